"""The walk of a request through our files, as the benchmark counts it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import walk

FIRST = """\
from walked_second import ask, each

def begin():
    ask()
    return sorted([2, 1], key=each), [answer() for _ in range(3)]

def answer():
    return None
"""
SECOND = """\
def ask():
    return [one for one in (1, 2)]

def each(one):
    return one
"""


def test_calls_and_returns_between_our_files_are_moves_through_whatever_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walked_first.py").write_text(FIRST)
    (tmp_path / "walked_second.py").write_text(SECOND)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(walk, "OWN", f"{tmp_path}/")
    first = importlib.import_module("walked_first")
    monkeypatch.delitem(sys.modules, "walked_second")
    monkeypatch.delitem(sys.modules, "walked_first")
    with walk.walking() as walked:
        first.begin()
    assert walked.files == ["walked_first.py", "walked_second.py"]
    assert walked.moves == 2 + 2 * 2  # `ask` and back, `each` twice and back


def test_the_shortest_walk_is_certain_when_it_came_several_times() -> None:
    quiet, busy = walk.Walk(["a", "b"], 4), walk.Walk(["a", "b", "timer"], 9)
    assert not walk.is_certain([])
    assert not walk.is_certain([busy, busy, busy, quiet, quiet])
    assert walk.is_certain([quiet, busy, quiet, quiet])
    assert walk.is_certain([busy, *[quiet] * (walk.TIMES - 1), walk.Walk([], 0)] * walk.MOST)
