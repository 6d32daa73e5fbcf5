"""A vLLM engine in a process of its own: reads a scenario as JSON from stdin, prints what came of each step.

    {"model": folder, "tiers": file or null, "connector": [module, class], "engine": {LLM arguments}, "steps": [...]}

| step                            | result                                                              |
|---------------------------------|---------------------------------------------------------------------|
| ["generate", prompts, options]  | {"tokens": [[...]], "cached": [...], "reasons": [...]}              |
| ["reset", connector too]        | what reset_prefix_cache returned                                    |
| ["remove", folder]              | null: the folder is gone, from under whoever has files of it open   |
| ["metrics"]                     | counters by name and labels                                         |
| ["state"]                       | counters, open jobs, pages and events of the connector, in-process only |

A prompt is a list of token ids; options are max_tokens, salt, lora (name and folder), hicache (hints) and priority.
"""

import json
import os
import shutil
import sys
import time
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine may be shared
    "OMP_NUM_THREADS": "1",
}
DEFAULTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "block_size": 32,
    "disable_log_stats": False,
}


def start(scenario: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    options = {**DEFAULTS, **scenario.get("engine", {})}
    if scenario.get("tiers"):
        module, name = scenario.get("connector", ["hicache.integrations.vllm", "HiCacheConnector"])
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"config": scenario["tiers"]},
        )
    if scenario.get("events"):
        options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return LLM(model=scenario["model"], **options)


def generate(llm: Any, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    extra = {"kv_transfer_params": {"hicache": options["hicache"]}} if "hicache" in options else None
    sampling = SamplingParams(
        temperature=0,
        max_tokens=options.get("max_tokens", 40),
        detokenize=False,
        ignore_eos=True,
        extra_args=extra,
    )
    salt = {"cache_salt": options["salt"]} if "salt" in options else {}
    lora = LoRARequest(options["lora"][0], 1, options["lora"][1]) if "lora" in options else None
    inputs = [{"prompt_token_ids": prompt, **salt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens for one in outputs],
        "reasons": [one.outputs[0].finish_reason for one in outputs],
    }


def metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            labels = ",".join(f"{key}={value}" for key, value in sorted(metric.labels.items()) if key == "source")
            found[f"{metric.name}{{{labels}}}" if labels else metric.name] = metric.value
    return found


def state(llm: Any) -> dict[str, Any]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    index = scheduler.index
    for _ in range(100):  # an idle engine does not ask its workers what has ended
        if len(scheduler._jobs):
            time.sleep(0.1)
            generate(llm, [[5, 6, 7]], {"max_tokens": 1})
    return {
        "counters": dict(scheduler.counters),
        "open_jobs": len(scheduler._jobs),
        "entries": len(index),
        "owned_pages": index.owned_pages(),
        "pins": sum(entry.pins for entry in index.entries()),
        "tracks": len(scheduler._tracks),
    }


def run(llm: Any, step: list[Any]) -> Any:
    kind, *rest = step
    if kind == "generate":
        return generate(llm, rest[0], rest[1] if len(rest) > 1 else {})
    if kind == "reset":
        return llm.reset_prefix_cache(reset_connector=rest[0])
    if kind == "remove":
        shutil.rmtree(rest[0])
        return None
    return {"metrics": metrics, "state": state}[kind](llm)


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # whatever the engine prints goes to stderr
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    scenario = json.load(sys.stdin)
    llm = start(scenario)
    results = [run(llm, step) for step in scenario["steps"]]
    with os.fdopen(out, "w") as stream:
        json.dump(results, stream)
    if hasattr(llm.llm_engine.engine_core, "shutdown"):
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
