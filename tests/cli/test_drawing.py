"""The overview as lines of a terminal: as wide as it is, and never a command to it."""

from __future__ import annotations

import re

import pytest

from sidecar.cli.drawing import NARROWEST, TerminalStyle, draw, wrapped
from sidecar.cluster.document import RefusalView, ReplicaView, TenantView
from sidecar.engines.view import Amount
from sidecar.telemetry.recent import Bucket
from tests.cluster.views import engine, engines, gave_way, overview, sizes, starved, tier

HOSTILE = "\x1b]0;owned\x07\x1b[2Jname\r\n\u202e"


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def test_it_says_who_starves_and_shows_every_tier() -> None:
    shown = overview()
    lines = draw(shown, TerminalStyle(120))
    assert shown.headline in " ".join(lines)
    batch = next(line for line in lines if line.startswith("batch   "))
    assert re.search(r"20k / 20 +30 +3 m 12 s +2 m 40 s .*high 41x \(level, reserve\)$", batch)
    bar = next(line for line in lines if line.startswith("tokens"))
    assert "90k of 100k, 10k free" in bar
    drawn = bar.split()[1]
    assert (drawn.count("h"), drawn.count("b"), drawn.count("·")) == (42, 12, 6)  # 70%, 20% and 10% of 60
    assert any(line.endswith("queue_full after 2.0 s: no place") for line in lines)


def test_the_figures_of_engines_with_short_names_stand_below_their_titles() -> None:
    lines = draw(overview(engines=[engine("a"), engine("b")]), TerminalStyle(120))
    (at,) = [place for place, line in enumerate(lines) if line.startswith("ENGINE")]
    assert [len(line) for line in lines[at : at + 3]] == [len(lines[at])] * 3


def test_a_line_for_each_engine_and_why_it_gets_no_requests() -> None:
    assert not any(line.startswith("ENGINE") for line in draw(overview(), TerminalStyle(120)))
    lines = draw(overview(engines=engines()), TerminalStyle(120))
    at = next(number for number, line in enumerate(lines) if line.startswith("ENGINE"))
    assert [line.split() for line in lines[at : at + 7]] == [
        ["ENGINE", "STATE", "TOKENS", "REQUESTS", "UN-PREFILLED", "CLAIMS", "IN", "FLIGHT", "HITS"],
        ["a#1", "ready", "20k", "of", "400k", "20", "of", "160", "3,000", "1", "20", "42%"],
        ["b#1", "draining", "20k", "of", "400k", "20", "of", "160", "3,000", "0", "20", "~30%"],
        ["c#3", "down", "0", "of", "400k", "0", "of", "160", "3,000", "1", "20", "-"],
        ["connection", "refused", "by", "http://c:8000"],
        ["d#1", "ready", "20k", "20", "of", "160", "3,000", "1", "20", "-"],
        ["down", "at", "gpu-2", "0123abcd"],
    ]
    narrow = draw(overview(engines=engines()), TerminalStyle(NARROWEST))
    assert [line.split() for line in narrow if line.startswith("ENGINE")] == [["ENGINE", "STATE", "TOKENS", "HITS"]]


def test_what_leases_hold_and_use_is_a_line_where_lengths_are_learned() -> None:
    assert not any(line.startswith("leases") for line in draw(overview(), TerminalStyle(140)))
    lines = draw(overview(lease_sizes=[sizes()]), TerminalStyle(140))
    assert "leases hold 40k tokens, use 30k (75%), expect 44k; quantile 0.95, overlap 1; grew 12x" in lines
    raised = sizes("b", quantile=0.9875, overlap=0.83, is_raised=True, reason="r" * 90, preemptions=7)
    lines = draw(overview(lease_sizes=[sizes("a", held_tokens=0, used_tokens=0), raised]), TerminalStyle(NARROWEST))
    (at,) = [place for place, line in enumerate(lines) if line.startswith("leases")]
    said = " ".join(line.strip() for line in lines[at : at + 8])
    assert "hold 40k tokens, use 30k (75%), expect 88k" in said
    assert "quantile 0.95 to 0.9875, overlap 0.83 to 1; grew 24x, 7 preempted by the engine" in said
    assert "b: rrrr" in said
    assert all(len(line) <= NARROWEST for line in lines)


@pytest.mark.parametrize("width", [NARROWEST, 140])
def test_what_came_as_promised_is_a_line_where_a_tier_has_an_objective(width: int) -> None:
    assert not any(line.startswith("as promised") for line in draw(overview(), TerminalStyle(width)))
    buckets = [Bucket(1, offered=30, met=29, gain_earned=97, gain_attainable=100), Bucket(6, offered=10, met=5)]
    lines = draw(overview(tier("high", recent=buckets), tier(HOSTILE, 1, recent=buckets)), TerminalStyle(width))
    (at,) = [place for place, line in enumerate(lines) if line.startswith("as promised")]
    said = " ".join(line.strip() for line in lines[at : at + 6])
    assert "as promised, 5 min: high 85% of 40, 97% of tokens in time; ?]0;owned" in said
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize("width", [NARROWEST, 140])
def test_what_was_preempted_and_what_that_cost_is_below_its_tier(width: int) -> None:
    refused = RefusalView(1.0, "batch", "acme", "queue_timeout", 503, "no room", "id", 2.0, "one", preempted=1)
    lines = draw(overview(tier("high"), gave_way(), refusals=[refused]), TerminalStyle(width))
    (at,) = [number for number, line in enumerate(lines) if line.startswith("batch ")]
    assert " ".join(" ".join(lines[at + 1 : at + 3]).split()).startswith("preempted 3 times, 9.6 s at the engine lost")
    assert sum("preempted" in line for line in lines[:at]) == 0
    if width == 140:
        assert any(line.endswith("queue_timeout after 2.0 s, preempted 1x: no room") for line in lines)


def test_a_notice_of_two_mistakes_has_a_line_for_each() -> None:
    lines = draw(
        overview(notices=["the files cannot be used: a.yaml:3: at most 9\na.yaml:5: no tier"]), TerminalStyle(80)
    )
    (at,) = [number for number, line in enumerate(lines) if line.startswith("! ")]
    assert lines[at : at + 2] == ["! the files cannot be used: a.yaml:3: at most 9", "a.yaml:5: no tier"]


@pytest.mark.parametrize("width", [1, NARROWEST, 60, 80, 100, 140, 250])
@pytest.mark.parametrize("colors", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, colors: bool) -> None:
    long = overview(
        starved("a-tier-whose-name-is-long"),
        *(tier(f"tier-{n}", n, held=Amount(n, n)) for n in range(9)),
        gave_way("another", 9),
        pool="p" * 100,
        tenants=[TenantView("t" * 100, 10**9, 1, 1)],
        replicas=[ReplicaView("r" * 40, "h" * 100, 1, 1, 3.0)],
        refusals=[RefusalView(1.0, "t" * 50, "u" * 50, "code", 503, "m" * 300, "i" * 128, 1.0, "one")],
        notices=["n" * 300],
        engines=[*engines(), engine("e" * 64, state="down", reason="r" * 200), engine("f", id=f"f#{10**9}")],
    )
    lines = plain(draw(long, TerminalStyle(width, colors)))
    assert max(len(line) for line in lines) <= max(NARROWEST, width)


def test_colors_only_where_they_are_wanted() -> None:
    assert "\x1b" not in "".join(draw(overview(), TerminalStyle(100, colors=False)))
    colored = draw(overview(), TerminalStyle(100, colors=True))
    assert "\x1b[" in "".join(colored)
    assert plain(colored) == draw(overview(), TerminalStyle(100, colors=False))


def test_a_terminal_obeys_nothing_that_comes_from_a_request() -> None:
    shown = overview(
        starved(HOSTILE, by=HOSTILE),
        pool=HOSTILE,
        engine=HOSTILE,
        tenants=[TenantView(HOSTILE, 1, 1, 1)],
        replicas=[ReplicaView(HOSTILE, HOSTILE, 1, 1, 0.0)],
        refusals=[RefusalView(1.0, HOSTILE, HOSTILE, HOSTILE, 503, HOSTILE, HOSTILE, 0.0, "one")],
        notices=[HOSTILE],
        engines=[engine(HOSTILE, state=HOSTILE, reason=HOSTILE, elsewhere=HOSTILE)],
    )
    for width in (60, 140):
        text = "".join(draw(shown, TerminalStyle(width)))
        assert text.isprintable()
        assert "name" in text


def test_an_ascii_terminal_gets_ascii() -> None:
    for width in (50, 120):
        "".join(draw(overview(), TerminalStyle(width, unicode=False))).encode("ascii")


def test_an_empty_and_an_unbounded_pool_can_be_drawn() -> None:
    nothing = overview(
        tier("only", reserve=Amount(), limit=Amount()), capacity=Amount(), free=Amount(), tenants=[], refusals=[]
    )
    lines = draw(nothing, TerminalStyle(100))
    assert "No request waits." in lines
    assert not any(line.startswith(("tokens", "requests", "TENANT", "LAST")) for line in lines)


def test_a_flood_of_the_same_refusal_is_one_line() -> None:
    refusals = [
        RefusalView(100.0 - n, "batch", "acme", "queue_full", 503, "no", f"id-{n}", 0.0, "one") for n in range(9)
    ]
    lines = draw(overview(refusals=refusals), TerminalStyle(100))
    assert [line.split("  ")[-1] for line in lines if "queue_full" in line] == ["queue_full (9x): no"]
    assert sum("id-" in line for line in lines) == 1


def test_a_replica_that_runs_another_policy_is_marked() -> None:
    named = [ReplicaView(f"r{n}", "host", 1, 0, 0.0, run) for n, run in enumerate(("abc", "def", ""))]
    lines = [
        line
        for line in draw(overview(replicas=named, generation="abc"), TerminalStyle(100))
        if line.startswith("host r")
    ]
    assert ["policy" in line for line in lines] == [False, True, False]
    assert lines[1].startswith("host r1 policy def ")


def test_text_is_broken_between_words() -> None:
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert wrapped("", 4) == [""]
