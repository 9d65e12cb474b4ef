"""A table of cases in one test: it goes through all rows, and reports every one that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

LONGEST_SHOWN = 200
"""Characters of a row: enough to find it in its table."""
Names = "Collection[str] | Callable[[Any], str]"


def each(names: str | Sequence[str], rows: Collection[Any], ids: Names = ()) -> Callable[[Any], Any]:
    """As `pytest.mark.parametrize`, but one item for all rows, with the same fixtures: for rows that cost little.

    Each row has a `tmp_path` of its own, and a `monkeypatch` that is undone after it; `caplog` and `capsys` are empty.
    Fails with each row that fails, its line and its error; the first one's traceback is shown whole.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    assert rows
    named = ids if callable(ids) else list(ids)
    given = [dict(zip(wanted, (row,) if isinstance(names, str) else row, strict=True)) for row in rows]

    def in_one(test: Any) -> Any:
        def run(**fixtures: Any) -> None:
            failed: list[str] = []
            for number, row in enumerate(given):
                with _noted(failed, _name(named, number, row), test), _own(fixtures, number) as own:
                    test(**own, **row)
            assert not failed, _report(failed)

        async def run_async(**fixtures: Any) -> None:
            failed: list[str] = []
            for number, row in enumerate(given):
                with _noted(failed, _name(named, number, row), test), _own(fixtures, number) as own:
                    await test(**own, **row)
            assert not failed, _report(failed)

        made: Any = functools.wraps(test)(run_async if inspect.iscoroutinefunction(test) else run)
        signature = inspect.signature(test)
        assert set(wanted) <= set(signature.parameters), f"{test.__name__} takes no {wanted}"
        left = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        made.__signature__ = signature.replace(parameters=left)
        return made

    return in_one


@contextmanager
def _noted(failed: list[str], name: str, test: Any) -> Iterator[None]:
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        file = inspect.getfile(test)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        failed.append(f"{name}\n  line {lines[0] if lines else '?'}: {type(error).__name__}: {error}")
        if len(failed) == 1:
            traceback.print_exception(error)  # which pytest shows with the failure


@contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] /= f"row-{number}"
        own["tmp_path"].mkdir()
    if "caplog" in own:
        own["caplog"].clear()
    if "capsys" in own:
        own["capsys"].readouterr()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        yield own


def _name(ids: Names, number: int, row: dict[str, Any]) -> str:
    if callable(ids):
        return ids(*row.values())
    return ids[number] if ids else ", ".join(f"{name}={value!r}" for name, value in row.items())[:LONGEST_SHOWN]


def _report(failed: list[str]) -> str:
    return "\n".join([f"{len(failed)} failed:", *failed])
