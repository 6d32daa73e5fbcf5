"""hicache for vLLM: host and disk tiers under vLLM's own block pool, as a KV connector chosen by configuration.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config": "tiers.yaml"}}'

    connector      vLLM's interface, nothing else
    scheduler      in the scheduler's process: what is where, which jobs the workers get
      host_index     the host pages by block hash, their order of eviction
      fetches        pages that come from disk while their request waits
    worker         in each worker's process: the bytes, and the jobs
    jobs           what the two sides tell each other
    settings, identity, hints, events

Importable only where vLLM is.
"""

from hicache.integrations.vllm.connector import HiCacheConnector

__all__ = ["HiCacheConnector"]
