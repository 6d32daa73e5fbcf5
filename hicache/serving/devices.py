"""What the engine has to know of the device that it computes on: a device by its name, and all that differs.

A name is "cpu" or "cuda:N", as `hicache.device_pool.resolve_device` gives it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.serving.attention import Attention, flash_sdpa, pinned_sdpa, torch_sdpa
from hicache.serving.blocks import Chunk, Mode

_ATTENTION: dict[str, dict[Mode, Attention]] = {
    "cpu": {"exact": torch_sdpa, "fast": torch_sdpa},
    "cuda": {"exact": pinned_sdpa, "fast": flash_sdpa},
}


def attention_for(mode: Mode, device: torch.device) -> Attention:
    """The attention of a mode on a device."""
    return _ATTENTION[device.type][mode]


def upload(chunks: Sequence[Chunk], device: torch.device) -> Sequence[Chunk]:
    """The chunks with their tokens and tables on `device`: one copy, which the calling thread does not wait for."""
    if device.type == "cpu":
        return chunks
    parts = [part for chunk in chunks for part in (chunk.tokens, chunk.table)]
    # torch gives pinned memory out again only after the copy that reads it
    moved = torch.cat(parts).pin_memory().to(device, non_blocking=True)
    pieces = torch.split(moved, [len(part) for part in parts])
    return [Chunk(tokens, table) for tokens, table in zip(pieces[::2], pieces[1::2])]


def device_name(device: str) -> str:
    """What the device is, for people: "cpu" or "cuda:0, NVIDIA H200"."""
    return device if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"


def arithmetic(device: str) -> str:
    """What decides the last bits of torch's results on a device, in a word: kernels are chosen by a processor's
    vector instructions, or by a GPU's model; float32 products by the precision that is allowed."""
    if device == "cpu":
        return f"{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}"
    major, minor = torch.cuda.get_device_capability(device)
    card = torch.cuda.get_device_name(device)
    return (
        f"{torch.__version__}/cuda{torch.version.cuda}/{card}/sm_{major}{minor}/{torch.get_float32_matmul_precision()}"
    )
