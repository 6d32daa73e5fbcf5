"""The sections `costs` and `load`: what copies and prefill take here, and whether loading is weighed against them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, PlainValidator

from hicache.config.section import Duration, Section
from hicache.config.units import format_rate, parse_bandwidth, parse_count, parse_flops
from hicache.costs import Link

Bandwidth = Annotated[
    float, PlainValidator(parse_bandwidth), PlainSerializer(lambda rate: format_rate(rate, "B/s"), return_type=str)
]
Flops = Annotated[
    float, PlainValidator(parse_flops), PlainSerializer(lambda rate: format_rate(rate, "FLOPS"), return_type=str)
]
Count = Annotated[float, PlainValidator(parse_count)]
Rate = Annotated[float, Field(gt=0)]


class LinkCosts(Section):
    """One direction between two tiers. `latency` is that of one transfer, in seconds."""

    bandwidth: Bandwidth
    latency: Duration = 20e-6

    def link(self) -> Link:
        return Link(self.bandwidth, self.latency)


def _link(bandwidth: str, latency: str) -> LinkCosts:
    return LinkCosts.model_validate({"bandwidth": bandwidth, "latency": latency})


class PrefillCosts(Section):
    """Measured rates, or flops and the size of the model.

    `tokens_per_second` is the speed at the start of a prompt, `pairs_per_second` that of attention, in pairs of tokens:
    token number n has n of them. Or `flops` a second that the device reaches, with `parameters` used for a token and
    `attention_width` (layers * query heads * head_dim), both known for the models whose geometry is known.
    """

    tokens_per_second: Rate | None = None
    pairs_per_second: Rate | None = None
    flops: Flops = 400e12
    parameters: Count | None = None
    attention_width: Count | None = None


class CostsSection(Section):
    """The machine. Without it: one GPU of 400 reached TFLOPS on PCIe 4, and one NVMe disk."""

    to_device: LinkCosts = _link("24GB/s", "20us")
    to_host: LinkCosts = _link("24GB/s", "20us")
    disk_read: LinkCosts = _link("3GB/s", "100us")
    disk_write: LinkCosts = _link("1.5GB/s", "100us")
    lookup: Duration = 100e-6
    decode_step: Duration = 20e-3
    prefill: PrefillCosts = PrefillCosts()


class LoadSection(Section):
    """Whether pages that a lower tier has are loaded or computed anew.

    always and never speak for themselves; auto weighs both by `costs`, and changes its mind only for a gain of more
    than `hysteresis` (a share).
    """

    policy: Literal["always", "never", "auto"] = "always"
    hysteresis: Annotated[float, Field(ge=0, le=1)] = 0.1
