"""The report: a page that stands alone, shows what it should in a real browser, and lets nothing out of a trace act."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tools.replay.report import BINS, MOST_DOTS, Axis, occupancy, report, shown
from tests.support.browser import browser, opened
from tests.support.devtools import headless, tab
from tests.support.pages import serving_pages
from tests.tools.replay.seen import TIERS, played, seen

needs_browser = pytest.mark.skipif(browser() is None, reason="no browser; `sh .ci/browser` installs one as root")
HOSTILE = '</title><script>alert(1)</script><img src="http://127.0.0.1:9/x" onerror="alert(2)">\'&'


def two_runs() -> str:
    """A replay and its control, with a failure."""
    found = [seen(tier, n * 0.2, 0.1 + n * 0.1 * (level + 1)) for n in range(12) for level, tier in enumerate(TIERS)]
    found.append(seen("batch", 1.0, None, error="HTTP 503: full"))
    control = [seen(tier, n * 0.2, 0.4 + n * 0.2) for n in range(12) for tier in TIERS]
    runs = [played(found), played(control, name="control", title="control: equal priorities")]
    return report("Replay of burst", ["120 requests"], ("critical", *TIERS), runs)


def hostile() -> str:
    """Everything that comes from somewhere else tries to break out."""
    tiers = (HOSTILE, "batch")
    found = [seen(tier, n * 0.2, 0.1 + n) for n in range(9) for tier in tiers]
    found.append(seen(HOSTILE, 1.0, None, error=HOSTILE))
    return report(HOSTILE, [HOSTILE], tiers, [played(found, tiers, title=HOSTILE)])


def tags(page: str, name: str, kind: str = "") -> int:
    return len(re.findall(rf'<{name}\b[^>]*class="{kind}' if kind else rf"<{name}\b", page))


@needs_browser
@pytest.mark.parametrize("page", [two_runs, hostile])
def test_a_browser_opens_it_from_a_file_with_nothing_to_complain_about(page: object, tmp_path: Path) -> None:
    assert callable(page)
    file = tmp_path / "report.html"
    file.write_text(page(), encoding="utf-8")
    found = opened(file.as_uri(), tmp_path)
    assert found.console == []
    assert tags(found.dom, "script") == tags(found.dom, "img") == 0
    if page is two_runs:
        assert tags(found.dom, "svg") == 3 + 1 + 2 + 2 * 2  # the key, the CDF, and for each run TTFTs, waiting, running
        assert tags(found.dom, "polyline", "line t") == 6
        assert tags(found.dom, "polyline", "line t[0-9] control") == 3
        assert tags(found.dom, "polygon", "area t") == 2 * 2 * 3
        assert tags(found.dom, "path", "line failed t") == 1
        assert "<title>high, replay: half of 12 within 0.7 s</title>" in found.dom


@pytest.mark.long
@needs_browser
def test_it_asks_the_network_for_nothing_but_itself(tmp_path: Path) -> None:
    for page in (two_runs(), hostile()):
        with serving_pages({"/report.html": (200, page)}) as server:
            assert opened(f"{server.url}/report.html", tmp_path).console == []
        assert [path for path, _ in server.asked] == ["/report.html"]


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, 1), (390, 1), (1200, 0)])
def test_it_is_drawn_wide_on_a_phone_and_in_the_dark(width: int, scheme: int, tmp_path: Path) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "picture.png"
    file.write_text(two_runs(), encoding="utf-8")
    look = (f"--window-size={width},1600", f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}")
    opened(file.as_uri(), tmp_path, *look)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (width, 1600)
    assert len(data) > 40_000, "a blank page is a tenth of that"


@needs_browser
@pytest.mark.anyio
async def test_neither_the_page_nor_its_table_scrolls_sideways_at_any_width(tmp_path: Path) -> None:
    for number, page in enumerate((two_runs(), hostile())):
        file = tmp_path / f"report-{number}.html"
        file.write_text(page, encoding="utf-8")
        with headless(tmp_path / str(number)) as tools:
            async with tab(tools) as opened_page:
                await opened_page.open(file.as_uri())
                for width in (320, 390, 700, 1000, 1300):
                    await opened_page.look(width, 900)
                    await opened_page.until(f"innerWidth === {width}")
                    assert await opened_page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
                    assert await opened_page.evaluate(SCROLLS) == [], width
                await opened_page.look(390, 900)
                assert await opened_page.evaluate("getComputedStyle(document.querySelector('tr')).clipPath") != "none"


SCROLLS = """[...document.querySelectorAll('table, td, p, div')].filter((node) => node.clientWidth > 1)
  .filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.outerHTML.slice(0, 80))"""


def test_every_figure_has_its_name_where_the_head_is_not_shown() -> None:
    labels = re.findall(r'data-label="([^"]*)"', two_runs().partition("<table")[2])
    assert labels[:6] == ["", "requests", "failed", "TTFT, s p50", "TTFT, s p95", "TTFT, s p99"]
    assert labels[6:12] == [
        "TPOT, ms p50", "queue wait, s p50", "queue wait, s p95", "starvation, s p50", "starvation, s p95", "tokens/s",
    ]  # fmt: skip


def test_it_loads_nothing_and_forbids_itself_to() -> None:
    for page in (two_runs(), hostile()):
        assert "default-src 'none'" in page
        assert set(re.findall(r"<[^>]*\b(?:src|href)=\"([^\"]*)\"", page)) == {"data:,"}
        assert "<script" not in page
        assert "@import" not in page
        assert "url(" not in page


def test_everything_from_elsewhere_is_escaped() -> None:
    page = hostile()
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_a_tier_that_fails_half_is_drawn_up_to_half() -> None:
    answered = [seen("high", 0.0, 0.1 * n) for n in range(1, 4)]
    failed = [seen("high", 0.0, None, error="HTTP 503: full", runs_s=0.0) for _ in range(4)]
    page = report("Replay", [], TIERS, [played([*answered, *failed])])
    assert "<title>high, replay: 4 of 7 failed</title>" in page
    assert "Percentiles are of the 3 of 7 requests that were answered" in page


def test_who_has_no_requests_is_not_in_the_key() -> None:
    page = two_runs()
    assert "critical" not in page
    assert tags(page, "li") == 3


def test_runs_without_a_single_answer_have_a_report_too() -> None:
    failed = played([seen("high", 0.0, None, error="no", runs_s=0.0)])
    page = report("Replay", [], TIERS, [failed])
    assert "1 x no" in page
    assert tags(page, "svg") == 1 + 4


def test_a_long_trace_draws_no_more_dots_than_can_be_distinguished() -> None:
    many = played([seen("high", n * 0.01, 0.5) for n in range(MOST_DOTS * 2 + 7)])
    page = report("Replay", [], TIERS, [many])
    drawn = tags(page, "circle", "dot") - 1  # one is in the key
    assert drawn == shown(MOST_DOTS * 2 + 7) <= MOST_DOTS
    assert f"{drawn} of {MOST_DOTS * 2 + 7} requests drawn" in page
    assert len(page) < 1_000_000


spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)).map(lambda pair: (min(pair), max(pair))), max_size=20)


@given(spans)
def test_occupancy_keeps_every_second_of_every_span(found: Sequence[tuple[float, float]]) -> None:
    parts = occupancy(found, 10.0)
    assert len(parts) == BINS
    assert min(parts) >= 0
    assert max(parts) <= len(found) + 1e-9
    assert sum(parts) * 10.0 / BINS == pytest.approx(sum(end - start for start, end in found), abs=1e-6)


@given(st.floats(1e-6, 1e9))
def test_an_axis_has_a_few_round_ticks(most: float) -> None:
    ticks = Axis(most, 0.0, 100.0).ticks()
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert ticks[-1] <= most * 1.001
