"""Tables and sentences as text: aligned, whole, and never a command to a terminal."""

from __future__ import annotations

from sidecar.tools.text import table, wrapped

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]na[/]me\r\n\u202e"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[red]na[/]me\r\n\u202e"


def test_words_are_to_the_left_and_figures_to_the_right_and_nothing_is_cut() -> None:
    assert table([["tier", "tokens", "why"], ["t" * 300, "7", "n"]], left=(0, 2), indent="  ") == [
        f"  tier{' ' * 296}  tokens  why",
        f"  {'t' * 300}       7  n",
    ]


def test_a_terminal_obeys_no_name() -> None:
    assert table([[HOSTILE, HOSTILE], ["a", "b"]]) == [f"{SHOWN}  {SHOWN}", f"{'a':<{len(SHOWN)}}  {'b':>{len(SHOWN)}}"]
    assert wrapped(HOSTILE) == [SHOWN]


def test_text_is_broken_between_words() -> None:
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("one two-three", 7, head="- ", below="") == ["- one", "two-three"]
    assert wrapped("", 4) == []
