"""What must not be shared is not shared, on any tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines import prompt, run_engine
from tiny_model import make_adapter

ONE = [prompt(0)]
Tiers = Callable[..., str]


def test_salts_share_nothing(model: str, reference: list[list[int]], tiers: Tiers) -> None:
    file = tiers()
    options = [{"salt": "a"}, {"salt": "b"}, {}, {"salt": "a"}]
    steps = [["generate", ONE, one] for one in options]
    first = run_engine([steps[0], *steps, ["reset", False], *steps], model=model, tiers=file)
    assert [one["cached"] for one in first[1:5]] == [[992], [0], [0], [992]]
    assert [one["cached"] for one in first[6:]] == [[992]] * 4
    assert all(one["tokens"] == reference[:1] for one in first if not isinstance(one, bool))
    later = run_engine([["generate", ONE, {"salt": "c"}], *steps], model=model, tiers=file)
    assert [one["cached"] for one in later] == [[0], [992], [992], [992], [992]]


def test_adapters_share_nothing(model: str, tmp_path: Path, tiers: Tiers) -> None:
    """Also not one that took another's name while the engine was down."""
    file = tiers()
    engine = {"enable_lora": True, "max_lora_rank": 8}
    folder = make_adapter(tmp_path / "adapter", 1)
    steps = [["generate", ONE, {"lora": ["mine", str(folder)]}], ["generate", ONE]]
    plain = run_engine(steps, model=model, engine=engine)
    assert plain[0]["tokens"] != plain[1]["tokens"]
    cold = run_engine(steps, model=model, engine=engine, tiers=file)
    warm = run_engine(steps, model=model, engine=engine, tiers=file)
    assert [one["tokens"] for one in cold] == [one["tokens"] for one in warm] == [one["tokens"] for one in plain]
    assert [one["cached"] for one in cold] == [[0], [0]]
    assert [one["cached"] for one in warm] == [[992], [992]]
    folder.rename(tmp_path / "old")
    make_adapter(folder, 2)
    other = run_engine(steps, model=model, engine=engine, tiers=file)
    assert [one["cached"] for one in other] == [[0], [992]]
    assert other[0]["tokens"] != warm[0]["tokens"]


def test_another_block_size_or_dtype_shares_nothing(model: str, tiers: Tiers) -> None:
    file = tiers()
    run_engine([["generate", ONE]], model=model, tiers=file)
    (blocks,) = run_engine([["generate", ONE]], model=model, tiers=file, engine={"block_size": 64})
    (halves,) = run_engine([["generate", ONE]], model=model, tiers=file, engine={"dtype": "bfloat16"})
    (same,) = run_engine([["generate", ONE]], model=model, tiers=file)
    assert [one["cached"] for one in (blocks, halves, same)] == [[0], [0], [992]]


def test_hints_are_honoured(model: str, tiers: Tiers) -> None:
    silent = {"hicache": {"store": False}}
    steps = [
        ["generate", ONE, silent],
        ["reset", False],
        ["generate", ONE],
        ["reset", False],
        ["generate", ONE, {"hicache": {"load": False}}],
        ["reset", False],
        ["generate", ONE, {"hicache": {"prefetch": True, "unknown": 1, "priority": "high"}}],
    ]
    results = run_engine(steps, model=model, tiers=tiers())
    assert [one["cached"] for one in results if not isinstance(one, bool)] == [[0], [0], [0], [992]]
