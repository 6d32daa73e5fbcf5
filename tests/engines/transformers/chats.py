"""Chats with models of transformers, with and without a prefix cache; a program too, so that a chat can go on in a
process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from hicache.integrations.transformers import PrefixCache

PAGE = 16
ANSWER = 12


@dataclass
class Turn:
    """`prefilled`: tokens that the model computed before the first of its answer. `restored`: by tier."""

    prompt: list[int]
    answer: list[int]
    prefilled: int
    restored: dict[str, int]


def tiers(folder: Path | None, **changes: Any) -> dict[str, Any]:
    """Small tiers on the CPU, with a store in `folder`."""
    device = {"tier": "device", "device": "cpu", "size": "4096 tokens", **changes}
    prefetch = {"policy": "wait_complete", "deadline": "30s"}
    storage = {"tier": "storage", "path": str(folder), "size": "512MiB", "prefetch": prefetch}
    return {
        "page_size": PAGE,
        "tiers": [device, {"tier": "host", "size": "8192 tokens"}] + [storage] * (folder is not None),
    }


def load_model(path: Path) -> Any:
    """A folder of transformers, or a GGUF file; in float32."""
    torch.set_num_threads(1)
    folder, file = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model.eval()


def user_tokens(turn: int, vocab: int) -> list[int]:
    """What the user says, a few dozen tokens, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + turn)
    return torch.randint(3, min(vocab, 30000), (40 + 7 * turn,), generator=generator).tolist()


class Counted:
    """Counts the tokens that go through a model."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.tokens += (args[0] if args else kwargs["input_ids"]).shape[1]

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()


def chat(model: Any, cache: PrefixCache | None, turns: Sequence[int], history: Sequence[int] = ()) -> list[Turn]:
    """Turns of one chat, greedy, each prompt the whole chat so far."""
    done, tokens = [], list(history)
    for turn in turns:
        prompt = tokens + user_tokens(turn, model.config.vocab_size)
        settings = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
        before = cache.stats().hit_tokens if cache is not None else {}
        with Counted(model) as counted:
            if cache is None:
                output = model.generate(torch.tensor([prompt]), **settings)
            else:
                output = cache.generate(torch.tensor([prompt]), **settings)
        tokens = output[0].tolist()
        after = cache.stats().hit_tokens if cache is not None else {}
        restored = {tier: after[tier] - before[tier] for tier in after if after[tier] > before[tier]}
        done.append(Turn(prompt, tokens[len(prompt) :], counted.tokens - (ANSWER - 1), restored))
    return done


def in_a_new_process(model: Path, store: Path, turns: range, history: Sequence[int] = ()) -> list[Turn]:
    """As `chat`, with the cache on disk in `store`."""
    request = {"model": str(model), "store": str(store), "turns": list(turns), "history": list(history)}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(request)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Turn(**turn) for turn in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=json.loads)
    request = parser.parse_args().request
    model = load_model(Path(request["model"]))
    with PrefixCache.open(model, tiers(Path(request["store"]))) as cache:
        turns = chat(model, cache, request["turns"], request["history"])
        cache.wait()
        cache.hicache.check_integrity()
    print(json.dumps([asdict(turn) for turn in turns]))


if __name__ == "__main__":
    main()
