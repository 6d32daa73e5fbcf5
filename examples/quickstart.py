"""A prompt is computed once; the second request that begins with it is served from the cache."""

from hicache.build import build_cache, build_requests
from hicache.config import parse_config
from hicache.requests import Request

CONFIG = """
model: {name: example/tiny, layers: 2, kv_heads: 1, head_dim: 8, dtype: float16}
page_size: 16
tiers:
  - {tier: device, device: cpu, size: 1024 tokens}
  - {tier: host, size: 4096 tokens}
"""

cache = build_cache(parse_config(CONFIG))
requests = build_requests(cache)
for rid in ("first", "second"):
    cache.poll()  # once a step: commit the copies that are done
    request = Request(rid, range(100))
    admission = requests.admit(request)  # match, lock, begin to load; None: no room yet
    assert admission is not None and requests.extend(request, 100)  # pages for all tokens; False: no room yet
    new = requests.pages(request)[admission.prefix_len // cache.page_size :]
    for plane in cache.tiers.device_pool.planes:  # your model in place of these two lines
        plane[new] = 1
    requests.commit(request, 100)
    requests.cache_finished_req(request)  # whole pages go to the tree, the rest back to the pool
    cache.end_step(None)  # send the step's host copies
    print(rid, "found", admission.prefix_len, "tokens of 100 in the cache")
cache.close()
