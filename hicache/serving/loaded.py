"""A model as its files or its seed describe it, and what a store must know of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hicache.hashing import StoreIdentity
from hicache.serving.blocks import EXACT_BLOCK, Mode
from hicache.serving.chat import ChatFormat
from hicache.serving.devices import arithmetic
from hicache.serving.geometry import ModelGeometry
from hicache.serving.tensors import Tensors
from hicache.serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """Weights under the names of `tensors`, with what belongs to them. The digests are SHA-256, in hex."""

    name: str
    geometry: ModelGeometry
    tensors: Tensors
    weights_digest: str
    tokenizer: Tokenizer | None = None
    tokenizer_digest: str | None = None
    chat: ChatFormat = field(default_factory=ChatFormat)

    def to(self, device: str) -> LoadedModel:
        """This model with its weights on `device`; those that are there already are shared."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def model_section(self, mode: Mode = "exact", device: str = "cpu") -> dict[str, str | int | None]:
        """The `model` section of a configuration whose store identity tells this model's KV from all other.

        `mode` is the Transformer's, `device` where it computes: KV of two modes or devices differs in its last bits.
        """
        geometry = self.geometry
        return {
            "name": self.name,
            "layers": geometry.layers,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "dtype": geometry.dtype,
            "weights_digest": self.weights_digest,
            "tokenizer_digest": self.tokenizer_digest,
            "rope_scaling": str(geometry.rope_scaling),
            "attention_backend": backend_name(mode, device),
        }

    def identity(self, page_size: int, mode: Mode = "exact", device: str = "cpu") -> StoreIdentity:
        """The same as `model_section`, as the identity of a store of pages of `page_size` tokens."""
        return StoreIdentity(
            self.geometry.layout(page_size),
            model=self.name,
            weights_digest=self.weights_digest,
            tokenizer_digest=self.tokenizer_digest,
            rope_scaling=str(self.geometry.rope_scaling),
            attention_backend=backend_name(mode, device),
        )


def backend_name(mode: Mode, device: str = "cpu") -> str:
    """Everything besides weights and tokens that the last bits of KV depend on: mode, torch's build, and what chooses
    its kernels on `device`."""
    blocks = f"exact{EXACT_BLOCK}" if mode == "exact" else "fast"
    return f"torch-sdpa/{blocks}/{arithmetic(device)}"
