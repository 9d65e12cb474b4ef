"""The fleet's benchmark: its load, its figures, and that each of its checks fails for what it is there for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.fleet import comparison, routers
from benchmarks.fleet import engines as emulated
from benchmarks.fleet.engines import EngineFigures
from benchmarks.fleet.load import load, tokens_of
from benchmarks.fleet.runs import Figures, Run, through
from benchmarks.fleet.scenarios import SCENARIOS, killed, storm
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict, summary
from sidecar.tools.loadgen import Planned, Seen
from tests.support.each import each

pytestmark = pytest.mark.long

started = routers.running

ROWS = [
    {"timestamp": 3_000 * (number // 8), "input_length": tokens, "output_length": 16 + number % 5, "hash_ids": hashes}
    for number, (tokens, hashes) in enumerate(
        [(2_048, [0, 1, 2, 3]), (1_500, [0, 1, 4]), (3_000, [0, 1, 2, 3, 5, 6]), (700, [0, 7])] * 20
    )
]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Eighty small requests that three engines serve in a second or two."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(msgspec.json.encode(row).decode() + "\n" for row in ROWS))
    return Setting(trace=trace, requests=len(ROWS), rate=2.0, engines=3, cache_tokens=400_000, warm_up=0.0)


def seen(ttft_s: float | None, *, sent_s: float = 0.0, cached: int = 0, error: str | None = None) -> Seen:
    body = b'{"messages": [{"content": "12345678"}], "max_tokens": 3}'
    first_s = None if ttft_s is None else sent_s + ttft_s
    status = 200 if ttft_s is not None else None
    return Seen(Planned(sent_s, "/", {}, body), sent_s, first_s, sent_s + 1, status, error, 3, 10, {}, None, 0, cached)


def run_of(router: str, p99_s: float, soon: float, hit_rate: float, **changes: object) -> Run:
    figures = Figures(1_000, 0, soon, p99_s / 4, p99_s, hit_rate)
    engine = EngineFigures(100, 400_000, 900, 1_000, 100, 100.0, 0.5, 250)
    use = {"router": 0.1, "engines": 0.2, "load": 0.1}
    found = Run(router, 1, figures, (1.0, 2.0, 3.0, 9.0), (engine,), use, 0.6, 0.01, ())
    return replace(found, **changes)  # type: ignore[arg-type]


GOOD = [
    run_of("round-robin", 200.0, 0.0, 0.10),
    run_of("cache-aware", 10.0, 0.90, 0.30),
    run_of(routers.OURS, 6.0, 0.95, 0.26),
]


def missed(runs: Sequence[Run]) -> list[str]:
    verdicts = comparison.judge(runs, Setting())
    assert len(verdicts) >= 5
    return [verdict.what.removeprefix("seed 1: ") for verdict in verdicts if not verdict.is_met]


def test_a_good_comparison_reaches_everything() -> None:
    assert missed(GOOD) == []


@each(
    ("changed", "what"),
    [
        (run_of(routers.OURS, 6.8, 0.95, 0.26), "best other p99 to ours"),
        (run_of(routers.OURS, 6.0, 0.89, 0.26), "ours, share with a first token within 5 s"),
        (run_of(routers.OURS, 6.0, 0.95, 0.25), "ours, hit rate of the best's"),
        (run_of(routers.OURS, 6.0, 0.95, 0.26, seen=(seen(None, error="reset"),)), "ours, failed requests"),
        (run_of(routers.OURS, 6.0, 0.95, 0.26, idle=0.05), "idle share of the machine"),
        (run_of(routers.OURS, 6.0, 0.95, 0.26, stalled_s=0.5), "longest stall of the load, s"),
        (
            run_of(routers.OURS, 6.0, 0.95, 0.26, engines=(replace(GOOD[0].engines[0], lost_s=5.0),)),
            "share of the engines' time lost",
        ),
        (
            run_of(routers.OURS, 6.0, 0.95, 0.26, engines=(replace(GOOD[0].engines[0], most_requests=129),)),
            "ours, most requests in an engine",
        ),
        (
            run_of(routers.OURS, 6.0, 0.95, 0.26, engines=(replace(GOOD[0].engines[0], most_tokens=500_001),)),
            "ours, most tokens in an engine",
        ),
    ],
)
def test_each_check_of_the_comparison_can_fail(changed: Run, what: str) -> None:
    assert missed([*GOOD[:-1], changed]) == [what]


def test_a_load_that_does_not_saturate_round_robin_shows_nothing() -> None:
    assert missed([replace(GOOD[0], quarters=(1.0, 2.0, 2.0, 3.0)), *GOOD[1:]]) == [
        "round robin's wait grows, last quarter to second"
    ]


def test_a_verdict_that_could_not_be_made_is_no_success() -> None:
    verdicts = [Verdict.at_most("a", 1, 1), Verdict.at_least("b", 0.5, 1.0), Verdict.at_least("c", None, 1.0)]
    assert [verdict.is_met for verdict in verdicts] == [True, False, None]
    assert "1 of 3 reached" in summary(verdicts)
    assert "NOT JUDGED" in summary(verdicts)


def test_the_work_of_a_killed_engine_is_an_error_only_for_those_that_had_a_first_byte() -> None:
    def met(*requests: Seen) -> list[bool | None]:
        return [verdict.is_met for verdict in killed._errors(requests, at_s=5.0)]

    begun = seen(0.1, sent_s=4.0, error="cut")
    assert met(seen(0.1), begun) == [True, True]
    assert met(begun, seen(None, sent_s=4.0, error="reset")) == [False, True]
    assert met(begun, seen(0.1, sent_s=6.0, error="cut")) == [False, True]  # it was sent to a dead engine
    assert met(seen(0.1)) == [True, False]  # nothing was killed


def test_a_run_through_real_processes_counts_the_same_hits_as_its_engines(setting: Setting) -> None:
    requests = load(setting)
    with emulated.running(setting) as engines, started("cache-aware", engines, setting) as router:
        run = asyncio.run(through([router], engines, requests, setting))
    assert run.failed == 0
    assert run.figures.hit_rate == pytest.approx(run.engines_hit_rate)
    assert run.figures.hit_rate > 0.5
    assert sum(each.finished for each in run.engines) == len(requests)
    assert sum(each.queried_tokens for each in run.engines) == sum(tokens_of(one)[0] for one in requests)
    assert all(0 < each.most_requests <= len(requests) for each in run.engines if each.finished)
    assert run.use["engines"] > 0
    assert run.use["router"] > 0


def test_every_scenario_has_a_row_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
    assert storm.run is SCENARIOS["storm"].run
    for name in ("routers", *SCENARIOS):
        assert f"| `{name}` |" in page
