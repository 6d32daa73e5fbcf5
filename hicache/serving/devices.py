"""What the engine has to know of the device that it computes on: a device by its name, and all that differs.

A name is "cpu" or "cuda:N", as `hicache.device_pool.resolve_device` gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from hashlib import sha256

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from hicache.serving.attention import Attention, flash_sdpa, pinned_sdpa, torch_sdpa
from hicache.serving.blocks import Chunk, Mode

_ATTENTION: dict[str, dict[Mode, Attention]] = {
    "cpu": {"exact": torch_sdpa, "fast": torch_sdpa},
    "cuda": {"exact": pinned_sdpa, "fast": flash_sdpa},
}


def attention_for(mode: Mode, device: torch.device) -> Attention:
    """The attention of a mode on a device."""
    return _ATTENTION[device.type][mode]


def threads_of(mode: Mode, device: torch.device) -> AbstractContextManager[None]:
    """What a step of a mode computes in: in exact mode on a CPU with one thread.

    A library that shares a product out among threads divides its sums, too: on an Intel CPU MKL and oneDNN do so along
    K where K is longer than N, and for few queries over many keys. One thread sums in one order, on every CPU.
    """
    return _one_thread() if mode == "exact" and device.type == "cpu" else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


@cache
def cpu_bits() -> str:
    """A digest of products, attention and norms that this CPU computes with one thread. Two CPUs of the same vector
    instructions may differ: MKL takes other paths for other makers, oneDNN other kernels for AMX."""
    found = sha256()
    draw = torch.Generator().manual_seed(0)
    with _one_thread(), torch.inference_mode():
        for rows, wide, narrow in ((16, 576, 192), (16, 192, 576), (16, 64, 64), (1, 576, 1024)):
            x, weight = torch.randn(rows, wide, generator=draw), torch.randn(narrow, wide, generator=draw)
            for dtype in (torch.float32, torch.bfloat16):
                found.update(linear(x.to(dtype), weight.to(dtype)).float().numpy().tobytes())
        query, key, value = (torch.randn(1, 4, tokens, 64, generator=draw) for tokens in (16, 304, 304))
        found.update(scaled_dot_product_attention(query, key, value).numpy().tobytes())
        found.update(torch.rsqrt(query.square().mean(-1)).exp().numpy().tobytes())
    return found.hexdigest()[:12]


def arithmetic(device: str) -> str:
    """What decides the last bits of torch's results on a device, in a word: kernels are chosen by a processor's
    vector instructions, or by a GPU's model; float32 products by the precision that is allowed."""
    if device == "cpu":
        return f"{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{cpu_bits()}"
    major, minor = torch.cuda.get_device_capability(device)
    card = torch.cuda.get_device_name(device)
    return (
        f"{torch.__version__}/cuda{torch.version.cuda}/{card}/sm_{major}{minor}/{torch.get_float32_matmul_precision()}"
    )
