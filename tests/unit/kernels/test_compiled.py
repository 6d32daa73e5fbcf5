from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import ProtocolError

compiled = pytest.importorskip("hicache.kernels.compiled", exc_type=ImportError)


def test_planes_of_scattered_bytes_are_refused() -> None:
    planes = [np.ones((4, 16), np.uint8)[:, ::2]]
    host = np.zeros((4, 8), np.uint8)
    with pytest.raises(ProtocolError, match="not rows of bytes"):
        compiled.CompiledCopier(planes, host)
    assert not host.any()


def test_pages_may_be_apart() -> None:
    spaced = np.arange(32, dtype=np.uint8).reshape(4, 8)
    host = np.zeros((4, 8), np.uint8)
    compiled.CompiledCopier([spaced[:, :4], spaced[:, 4:]], host).copy(np.array([3]), np.array([1])).gather()
    assert (host[1] == spaced[3]).all() and not host[[0, 2, 3]].any()
