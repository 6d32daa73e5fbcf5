from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config import parse_config
from hicache.config.cost_model import costs_of
from hicache.config.loading import load_costs
from hicache.config.units import format_rate, parse_bandwidth, parse_count, parse_flops
from hicache.costs import Costs, Link, PrefillCost
from hicache.errors import ConfigError

TEXT = """\
model: {name: %s, layers: 36, kv_heads: 8, head_dim: 128%s}
page_size: 16
tiers:
  - {tier: device, device: cpu, size: 1024 tokens}
"""


def test_a_transfer_is_its_latency_and_its_bytes() -> None:
    assert Link(100.0, 0.5).seconds(50) == 1.0
    assert Link().seconds(1e12) == 0.0


def test_prefill_is_additive_and_grows_with_the_position() -> None:
    cost = PrefillCost(1e-3, 1e-6)
    assert cost.seconds(0, 100) + cost.seconds(100, 300) == pytest.approx(cost.seconds(0, 300))
    assert cost.seconds(0, 300) == pytest.approx(0.3 + 300 * 300 / 2 * 1e-6)
    assert cost.seconds(1000, 1100) > cost.seconds(0, 100)


def test_prefill_from_flops() -> None:
    cost = PrefillCost.from_flops(1e12, 5e9, 1000)
    assert (cost.per_token, cost.per_pair) == (1e-2, 4e-9)


def test_instant_copies_leave_compute_alone() -> None:
    costs = Costs(PrefillCost(1.0), Link(1.0), Link(1.0), Link(1.0), Link(1.0), 1.0, 2.0)
    assert costs.instant_copies() == Costs(PrefillCost(1.0), decode_step=2.0)


def test_a_known_model_needs_nothing_and_ranks_share_its_work() -> None:
    alone = costs_of(parse_config(TEXT % ("Qwen/Qwen3-8B", "")))
    assert alone.prefill == PrefillCost.from_flops(400e12, 6.95e9, 36 * 32 * 128)
    assert alone.to_device == Link(24e9, 20e-6) and alone.disk_write == Link(1.5e9, 100e-6)
    shared = costs_of(parse_config(TEXT % ("Qwen/Qwen3-8B", ", tp_size: 2")))
    assert shared.prefill.per_token == alone.prefill.per_token / 2


def test_an_unknown_model_must_say_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"my.yaml:1: costs.prefill: how long prefill of a/b takes is not known"):
        costs_of(parse_config(TEXT % ("a/b", ""), source="my.yaml"))
    section = "costs: {prefill: {flops: 2TFLOPS, parameters: 1B, attention_width: 1000}}\n"
    by_flops = costs_of(parse_config(TEXT % ("a/b", "") + section)).prefill
    assert by_flops == PrefillCost.from_flops(2e12, 1e9, 1000)
    section = "costs: {prefill: {tokens_per_second: 500, pairs_per_second: 1000000}}\n"
    assert costs_of(parse_config(TEXT % ("a/b", "") + section)).prefill == PrefillCost(1 / 500, 1e-6)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("costs: {disk_read: {bandwidth: 3}}", "costs.disk_read.bandwidth: 3 is not a bandwidth"),
        ("costs: {disk_read: {bandwidth: 3GB}}", "'3GB' is not a bandwidth, write bytes per second such as 24GB/s"),
        ("costs: {disk_read: {bandwith: 3GB/s}}", "unknown key, did you mean 'bandwidth'?"),
        ("costs: {prefill: {flops: 4}}", "4: write a number above 0 with a unit, such as 400TFLOPS"),
        ("costs: {prefill: {tokens_per_second: 0}}", "costs.prefill.tokens_per_second"),
        ("costs: {prefil: {}}", "unknown key, did you mean 'prefill'?"),
        ("load: {policy: perhaps}", "'perhaps' is not one of 'always', 'never' or 'auto'"),
        ("load: {hysteresis: 2.0}", "load.hysteresis"),
    ],
)
def test_mistakes_are_named(section: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(TEXT % ("Qwen/Qwen3-8B", "") + section)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_rates_are_read_as_they_are_written() -> None:
    assert parse_bandwidth("24GB/s") == 24e9 and parse_bandwidth("1.5 MiB/s") == 1.5 * 2**20
    assert parse_flops("400TFLOPS") == 4e14 and parse_count("6.95B") == 6.95e9 and parse_count(7) == 7.0
    for rate in (1.0, 950.0, 3e9, 2.4e10, 1.5e15):
        assert parse_bandwidth(format_rate(rate, "B/s")) == rate


def test_costs_of_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("costs: {lookup: 3ms}\n")
    assert load_costs(path).lookup == 3e-3
    path.write_text("model: {}\n")
    with pytest.raises(ConfigError, match="there is no section 'costs'"):
        load_costs(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_costs(tmp_path / "none.yaml")
