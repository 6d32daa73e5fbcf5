"""Keys of stored pages are the same in every process: a store outlives the one that wrote it."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from hicache.hashing import RequestNamespace, page_digests
from hicache.testing.storage import IDENTITY
seed = IDENTITY.seed(RequestNamespace(salt="s", adapter="a").encode())
print(*(digest.hex() for digest in page_digests(seed, bytes(range(96)), 8)))
"""


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        outputs.add(subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True))
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3
