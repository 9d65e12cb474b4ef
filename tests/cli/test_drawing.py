"""The overview as lines of a terminal: as wide as it is, and never a command to it."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from sidecar.cli.top import draw
from sidecar.cluster.document import Overview, RefusalView, ReplicaView, TenantView
from sidecar.engines.view import Amount
from sidecar.telemetry.recent import Bucket
from tests.cluster.views import engine, engines, gave_way, overview, sizes, starved, tier

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red on blue]na[link=http://x]me[/]\r\n\u202e"
WIDTHS = [40, 60, 80, 100, 140, 250]


def drawn(shown: Overview, width: int, encoding: str = "utf-8", *, colors: bool = False) -> str:
    console = Console(
        width=width,
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding),
        force_terminal=colors,
        color_system="standard" if colors else None,
    )
    with console.capture() as captured:
        console.print(draw(shown, console))
    return captured.get()


def lines_of(shown: Overview, width: int) -> list[str]:
    return [line.rstrip() for line in drawn(shown, width).splitlines()]


def joined(shown: Overview, width: int) -> str:
    """All words, whatever the line in which they are."""
    return " ".join(drawn(shown, width).split())


def test_it_says_who_starves_and_shows_every_tier() -> None:
    shown = overview()
    assert shown.headline in joined(shown, 120)
    lines = lines_of(shown, 120)
    batch = next(line for line in lines if line.startswith("batch  "))
    assert re.search(r"20k / 20 +30 +3 m 12 s +2 m 40 s .*high 41x \(level, reserve\)$", batch)
    bar = next(line for line in lines if line.startswith("tokens"))
    assert "90k of 100k, 10k free" in bar
    cells = bar.split()[1]
    assert (cells.count("h"), cells.count("b"), cells.count(".")) == (42, 12, 6)  # 70%, 20% and 10% of 60
    assert any(line.endswith("queue_full after 2.0 s: no place") for line in lines)


def test_of_several_replicas_it_says_which_figures_are_those_of_one() -> None:
    assert "of this replica" not in joined(overview(), 120)
    both = [ReplicaView("one", "host", 90, 30, 0.0), ReplicaView("two", "host", 1, 1, 1.0)]
    said = joined(overview(replicas=both), 120)
    assert "of this replica alone: the last 5 minutes, leases, tenants and refusals" in said


def test_a_line_for_each_engine_and_why_it_gets_no_requests() -> None:
    assert "ENGINE" not in drawn(overview(), 120)
    lines = lines_of(overview(engines=engines()), 120)
    at = next(number for number, line in enumerate(lines) if line.startswith("ENGINE"))
    assert [line.split() for line in lines[at : at + 7]] == [
        ["ENGINE", "STATE", "TOKENS", "REQUESTS", "UN-PREFILLED", "CLAIMS", "IN", "FLIGHT", "HITS"],
        ["a#1", "ready", "20k", "of", "400k", "20", "of", "160", "3,000", "1", "20", "42%"],
        ["b#1", "draining", "20k", "of", "400k", "20", "of", "160", "3,000", "0", "20", "~30%"],
        ["c#3", "down", "0", "of", "400k", "0", "of", "160", "3,000", "1", "20", "-"],
        ["d#1", "ready", "20k", "20", "of", "160", "3,000", "1", "20", "-"],
        ["c#3:", "connection", "refused", "by", "http://c:8000"],
        ["d#1:", "down", "at", "gpu-2", "0123abcd"],
    ]
    assert len({len(line) for line in lines[at : at + 5]}) == 1  # figures stand below their titles
    narrow = lines_of(overview(engines=engines()), 40)
    assert [line.split() for line in narrow if line.startswith("ENGINE")] == [["ENGINE", "STATE", "TOKENS", "HITS"]]


@pytest.mark.parametrize("width", [40, 140])
def test_there_is_a_sentence_on_leases_promises_and_preemptions_where_there_is_something_to_say(width: int) -> None:
    assert not re.search(r"\bleases hold|as promised|preempted", joined(overview(), width))
    raised = sizes("b", quantile=0.9875, overlap=0.83, is_raised=True, reason="r" * 90, preemptions=7)
    buckets = [Bucket(1, offered=30, met=29, gain_earned=97, gain_attainable=100), Bucket(6, offered=10, met=5)]
    refused = RefusalView(1.0, "batch", "acme", "queue_timeout", 503, "no room", "id", 2.0, "one", preempted=1)
    said = joined(
        overview(
            tier("high", recent=buckets, guarded="97.4% met of 1,204 (97% promised), and so on"),
            gave_way(),
            lease_sizes=[sizes("a", held_tokens=0, used_tokens=0), raised],
            refusals=[refused],
        ),
        width,
    )
    assert "leases hold 40k tokens, use 30k (75%), expect 88k; " in said
    assert "quantile 0.95 to 0.9875, overlap 0.83 to 1; grew 24x, 7 preempted by the engine" in said
    assert "b: rrrr" in said
    assert "as promised, 5 min: high 85% of 40, 97% of tokens in time" in said
    assert "high: 97.4% met of 1,204 (97% promised), and so on" in said
    assert "batch: preempted 3 times, 9.6 s at the engine lost" in said
    assert "queue_timeout after 2.0 s, preempted 1x: no room" in said


def test_a_notice_of_two_mistakes_has_a_line_for_each() -> None:
    lines = lines_of(overview(notices=["the files cannot be used: a.yaml:3: at most 9\na.yaml:5: no tier"]), 80)
    at = next(number for number, line in enumerate(lines) if line.startswith("! "))
    assert lines[at : at + 2] == ["! the files cannot be used: a.yaml:3: at most 9", "a.yaml:5: no tier"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("colors", [True, False])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int, colors: bool) -> None:
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
    text = re.sub(r"\x1b\[[0-9;]*m", "", drawn(long, width, colors=colors))
    assert max(map(len, text.splitlines())) <= width
    assert text.count("m") >= 300
    assert text.count("h") >= 100


def test_colors_only_where_they_are_wanted() -> None:
    colored = drawn(overview(), 100, colors=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == drawn(overview(), 100)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_terminal_obeys_nothing_that_comes_from_a_request(width: int) -> None:
    shown = overview(
        starved(HOSTILE, by=HOSTILE),
        tier(HOSTILE, recent=[Bucket(1, offered=30, met=29)]),
        pool=HOSTILE,
        engine=HOSTILE,
        tenants=[TenantView(HOSTILE, 1, 1, 1)],
        replicas=[ReplicaView(HOSTILE, HOSTILE, 1, 1, 0.0)],
        refusals=[RefusalView(1.0, HOSTILE, HOSTILE, HOSTILE, 503, HOSTILE, HOSTILE, 0.0, "one")],
        notices=[HOSTILE],
        engines=[engine(HOSTILE, state=HOSTILE, reason=HOSTILE, elsewhere=HOSTILE)],
    )
    text = drawn(shown, width)
    assert text.replace("\n", "").isprintable()
    whole = "".join(text.split())
    assert whole.count(r"\x1b]0;owned\x07\x1b[2J[redonblue]na[link=http://x]me[/]\r\n\u202e") > 4  # shown, not obeyed
    styles = re.findall(r"\x1b[^a-zA-Z]*[a-zA-Z]", drawn(shown, width, colors=True))
    assert all(style.endswith("m") for style in styles)
    assert not any("44" in style for style in styles), "no blue ground: markup is text"


def test_an_ascii_terminal_gets_ascii() -> None:
    for width in (50, 120):
        drawn(overview(), width, "ascii").encode("ascii")


def test_an_empty_and_an_unbounded_pool_can_be_drawn() -> None:
    nothing = overview(
        tier("only", reserve=Amount(), limit=Amount()), capacity=Amount(), free=Amount(), tenants=[], refusals=[]
    )
    lines = lines_of(nothing, 100)
    assert "No request waits." in lines
    assert not any(line.startswith(("tokens", "requests", "TENANT", "LAST")) for line in lines)


def test_a_flood_of_the_same_refusal_is_one_line() -> None:
    refusals = [
        RefusalView(100.0 - n, "batch", "acme", "queue_full", 503, "no", f"id-{n}", 0.0, "one") for n in range(9)
    ]
    lines = lines_of(overview(refusals=refusals), 100)
    assert [line.split("  ")[-1] for line in lines if "queue_full" in line] == ["queue_full (9x): no"]
    assert sum("id-" in line for line in lines) == 1


def test_a_replica_that_runs_another_policy_is_marked() -> None:
    named = [ReplicaView(f"r{n}", "host", 1, 0, 0.0, run) for n, run in enumerate(("abc", "def", ""))]
    lines = [line for line in lines_of(overview(replicas=named, generation="abc"), 100) if line.startswith("host r")]
    assert ["policy" in line for line in lines] == [False, True, False]
    assert lines[1].startswith("host r1 policy def ")
