"""`each`: one item for a table, of which every row that fails is reported."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from tests.support.each import each


@pytest.fixture
def folder() -> str:
    return "f"


@pytest.mark.anyio
@each("number", [1, 2, 3])
@each(("one", "other"), [("a", "b"), ("c", "d")])
async def test_every_row_has_the_fixtures_and_a_folder_of_its_own(
    folder: str, tmp_path: Path, number: int, one: str, other: str
) -> None:
    assert (folder, number in {1, 2, 3}, one + other in {"ab", "cd"}) == ("f", True, True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "left").write_text("")


@each("number", [1, 2])
def test_what_a_row_has_changed_is_undone(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    assert "SIDECAR_OF_A_ROW" not in os.environ
    monkeypatch.setenv("SIDECAR_OF_A_ROW", str(number))


def test_every_row_that_fails_is_reported_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    @each(("number", "expected"), [(2, 3), (3, 3), (0, 0)], ids=["right", "wrong", "impossible"])
    def check(number: int, expected: int) -> None:
        assert 6 // number == expected

    with pytest.raises(AssertionError) as failed:
        check()
    line = inspect.getsourcelines(check)[1] + 2
    assert str(failed.value).startswith(f"2 failed:\nwrong\n  line {line}: AssertionError: assert (6 // 3) == 3")
    assert f"impossible\n  line {line}: ZeroDivisionError: " in str(failed.value)
    assert "assert 6 // number" in capsys.readouterr().err


def test_a_row_that_does_not_raise_is_reported() -> None:
    @each("text", ["x", "1"])
    def check(text: str) -> None:
        with pytest.raises(ValueError, match="invalid"):
            int(text)

    with pytest.raises(AssertionError, match=r"1 failed:\ntext='1'\n  line \d+: Failed: DID NOT RAISE"):
        check()
