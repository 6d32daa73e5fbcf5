"""The planes of a device pool on a GPU, as the CUDA kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ProtocolError


class CudaPlanes:
    """Planes on one GPU, in the order of the layout: each uint8 (num_pages, plane_bytes), contiguous.

    `addresses` are theirs, uint64 (num_planes,); `table` is the same on the GPU, int64, at
    `table_address`. Raises ProtocolError for
    tensors of different shapes or devices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds = {(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) != 1:
            raise ProtocolError(f"planes differ: {sorted(map(str, kinds))}" if kinds else "there are no planes")
        first = tensors[0]
        if first.dtype is not torch.uint8 or first.dim() != 2 or any(not tensor.is_contiguous() for tensor in tensors):
            raise ProtocolError("planes are not rows of bytes")
        self.tensors = tuple(tensors)  # keep the memory
        self.num_pages, self.plane_bytes = first.shape
        self.device = first.device
        self.addresses: npt.NDArray[np.uint64] = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        self.table = torch.from_numpy(self.addresses.view(np.int64)).to(first.device)
        self.table_address = self.table.data_ptr()

    def __len__(self) -> int:
        return len(self.tensors)
