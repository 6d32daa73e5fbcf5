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

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hicache.integrations.vllm.settings import check_early

if TYPE_CHECKING:
    from hicache.integrations.vllm.connector import HiCacheConnector

__all__ = ["HiCacheConnector"]


def __getattr__(name: str) -> object:
    """The connector's class, once what vLLM asks for it with has been read.

    vLLM gives a connector its configuration when the weights are loaded, in a process of its own. It looks for the
    class much earlier, in the first process, from a function that has the configuration: so a mistake is told there.
    """
    if name != "HiCacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    asking = sys._getframe(1).f_locals.get("kv_transfer_config")
    extra = getattr(asking, "kv_connector_extra_config", None)
    if getattr(asking, "kv_connector", None) == name and extra is not None:
        check_early(extra)
    from hicache.integrations.vllm.connector import HiCacheConnector

    return HiCacheConnector
