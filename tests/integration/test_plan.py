"""`hicache plan` on generated chats: its figures against a replay, its configuration, its report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hicache.cli import app, run
from hicache.config import load_config
from hicache.planning.hits import Hits
from hicache.planning.model_config import read_model
from hicache.planning.pages import page_trace
from hicache.planning.plan import PlanInput, make_plan
from hicache.planning.report import to_html
from hicache.planning.tables import notes, to_json
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.page_policies import BlockCache
from hicache.types import Tier

CHATS = "chats:conversations=30,turns=4,seed=5"
WORKLOAD = ChatWorkload(conversations=30, turns=4.0, seed=5)
LIMITS = {Tier.DEVICE: 1 << 30, Tier.HOST: 4 << 30, Tier.STORAGE: 16 << 30}


@pytest.fixture(scope="module")
def given() -> PlanInput:
    pages = page_trace(generate(WORKLOAD), 64)
    return PlanInput(pages, read_model("Qwen/Qwen3-0.6B"), LIMITS, ("lru", "slru"))


def test_curves_rise_and_min_bounds_them(given: PlanInput) -> None:
    plan = make_plan(given)
    assert [tier.tier for tier in plan.tiers] == list(Tier)
    for tier in plan.tiers:
        lru = [point.hit_rate for point in tier.curves["lru"].points]
        assert lru == sorted(lru)
        bound = dict(tier.bound)
        for curve in tier.curves.values():
            for point in curve.points:
                assert point.hit_rate <= bound.get(point.size, 1.0) + 1e-9
    assert plan.nothing.hit_rate == 0.0 < plan.tiers[0].curves["lru"].points[-1].hit_rate
    assert plan.predicted.ttft_mean < plan.nothing.ttft_mean


def test_the_points_of_a_policy_are_those_of_the_tree(given: PlanInput) -> None:
    plan = make_plan(given, bound=False)
    page_bytes = plan.token_bytes * 64
    for point in plan.tiers[0].curves["slru"].points:
        cache = BlockCache(point.size // page_bytes, "slru")
        hits = [cache.serve(request) for request in given.pages.requests]
        room = point.size // plan.token_bytes  # what a request longer than this would hit counts as a miss
        fits = [tokens <= room for tokens in given.pages.request_tokens]
        found = sum(count for count, fit in zip(hits, fits, strict=True) if fit)
        assert point.hit_rate == pytest.approx(found * 64 / given.pages.total_tokens)


def test_the_device_tier_has_room_for_the_longest_request_and_for_those_that_run(given: PlanInput) -> None:
    """Whatever it hits: a suggestion on which requests cannot run is none."""
    long = ChatWorkload(conversations=1, turns=1.0, seed=6, system_tokens=60_000, context_tokens=80_000)
    pages = page_trace([*generate(WORKLOAD), *generate(long)], 64)
    given = replace(given, pages=pages, limits={**LIMITS, Tier.DEVICE: 16 << 30})
    plan = make_plan(given, bound=False)
    longest = int(pages.request_tokens.max())
    assert longest > 60_000 and plan.floor.longest == longest
    assert plan.sizes.device >= plan.floor.running_bytes >= longest * plan.token_bytes
    assert make_plan(replace(given, max_running=1), bound=False).floor.running == 1
    assert not plan.explorer.too_long(plan.sizes.device).any()


def test_requests_too_long_for_the_limit_are_misses_and_told(given: PlanInput) -> None:
    lengths = sorted(given.pages.request_tokens.tolist())
    room = lengths[len(lengths) // 2]  # half of the requests are longer
    plan = make_plan(given, bound=False)
    limits = {Tier.DEVICE: room * plan.token_bytes, Tier.HOST: 4 << 30, Tier.STORAGE: 0}
    plan = make_plan(replace(given, limits=limits), bound=False)
    short = given.pages.request_tokens <= room
    assert plan.sizes.device == limits[Tier.DEVICE]
    assert plan.predicted.hit_rate * given.pages.total_tokens <= given.pages.prompt_tokens[short].sum()
    (line,) = [line for line in notes(plan, "*") if "cannot run: raise" in line.replace("\n", " ")]
    assert line.startswith(f"{int((~short).sum())} requests (")


@pytest.mark.parametrize("disk", ["none", "16GiB"])
def test_a_replay_hits_no_more_than_a_cache_without_limit(disk: str) -> None:
    budget = f"device=4GiB,host=4GiB,disk={disk}"
    result = CliRunner().invoke(app, ["plan", CHATS, "--model", "Qwen/Qwen3-0.6B", "--budget", budget, "--json"])
    found = json.loads(result.stdout)
    replayed = found["suggested"]["replayed"]
    assert 0 < replayed["hit_rate"] <= found["trace"]["reachable_hit_rate"] + 1e-9
    assert replayed["skipped_requests"] == 0


def test_a_limit_that_brings_nothing_is_not_suggested(given: PlanInput) -> None:
    everything = given.pages.unique_pages * 64 * 114_688
    assert everything < LIMITS[Tier.STORAGE]
    limits = {Tier.DEVICE: 2 * everything, Tier.HOST: 1 << 40, Tier.STORAGE: 1 << 40}
    plan = make_plan(PlanInput(given.pages, given.model, limits), bound=False)
    assert (plan.sizes.host, plan.sizes.storage) == (0, 0)
    assert plan.sizes.device < 2 * everything
    assert plan.predicted.hit_rate > 0.9 * Hits(given.pages).reachable / given.pages.total_tokens


def test_what_is_predicted_is_what_a_replay_of_the_suggestion_hits(tmp_path: Path) -> None:
    written = tmp_path / "tiers.yaml"
    command = ["plan", CHATS, "--model", "Qwen/Qwen3-0.6B", "--budget", "device=2GiB,host=4GiB,disk=none", "--json"]
    result = CliRunner().invoke(app, [*command, "--policies", "lru", "--write", str(written)])
    found = json.loads(result.stdout)
    suggested = found["suggested"]
    assert suggested["replayed"]["hit_rate"] == pytest.approx(suggested["predicted"]["hit_rate"], abs=0.08)
    assert suggested["replayed"]["hit_rate"] > 0.5
    config = load_config(written)
    assert config.device.size.amount == suggested["sizes"]["device"]
    assert found["model"]["bytes_per_token"] == 114_688


def test_the_suggestion_passes_config_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.yaml").write_text("costs: {prefill: {tokens_per_second: 100}}\n")
    budget = "device=256MiB,host=512MiB,disk=8GiB"
    command = ["plan", CHATS, "--model", "Qwen/Qwen3-0.6B", "--budget", budget, "--no-replay", "--write", "tiers.yaml"]
    assert run([*command, "--policies", "lru", "--costs", "costs.yaml"]) == 0
    config = load_config("tiers.yaml")
    assert config.storage is not None and config.costs.prefill.tokens_per_second == 100
    assert run(["config", "check", "tiers.yaml"]) == 0


def test_the_table_shows_every_tier_and_the_file() -> None:
    budget = "device=1GiB,host=2GiB,disk=none"
    command = ["plan", CHATS, "--model", "Qwen/Qwen3-0.6B", "--budget", budget, "--no-replay", "--policies", "lru"]
    text = CliRunner().invoke(app, command).stdout
    for part in (
        "device size",
        "host size",
        "lru hits",
        "MIN hits",
        "suggested: device",
        "tiers.yaml:",
        "page_size: 64",
    ):
        assert part in text
    assert "disk size" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing.json"], "neither a file nor known"),
        (["--model", "Qwen/Qwen3-8B", "--budget", "device=1KiB"], "1KiB holds no page"),
        (["--model", "Qwen/Qwen3-8B", "--policies", "belady"], "policy 'belady' is not known"),
        (["--model", "Qwen/Qwen3-8B", "--tp", "3"], "tp_size"),
        (["--model", "Qwen/Qwen3-8B", "--costs", "no.yaml"], "no.yaml: cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", CHATS, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_report_is_one_file_with_units_on_every_axis(given: PlanInput) -> None:
    plan = make_plan(given)
    html = to_html(plan, "chats & co")
    assert "chats &amp; co" in html
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|url\(|@import|<script""", html)
    titles = re.findall(r'<text class="title [xy]-title"[^>]*>([^<]*)<', html)
    assert len(titles) == 2 * html.count("<svg ")
    assert all(re.search(r"\(.+\)$", title) for title in titles), titles
    for heading in (
        "Device: hit rate",
        "Disk: mean time",
        "Hits over time",
        "Reuse distance",
        "Time until reuse",
        "Sessions",
    ):
        assert f"<h2>{heading}" in html
    assert to_json(plan)["tiers"]["disk"]["min"]
