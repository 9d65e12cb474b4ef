"""Discovery by a file that is written, swapped, broken and removed while it is followed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from sidecar.fleet.setup import FileDiscovery
from sidecar.policy import followed_files
from sidecar.policy.capacity import Capacity
from sidecar.policy.fleet import EngineAddress
from sidecar.policy.rules import UNLIMITED
from tests.support.waiting import other_tasks, until

pytestmark = pytest.mark.anyio


def read(path: Path) -> Sequence[EngineAddress]:
    """A reader as the policy has one: any mistake is a ValueError with a sentence."""
    try:
        entries = yaml.safe_load(path.read_text())
        return [
            EngineAddress(entry["name"], entry["url"], Capacity(tokens=1000, requests=8), UNLIMITED)
            for entry in entries
        ]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise ValueError(f"{path.name}:1: not a list of engines\n({type(error).__name__})") from None


def listed(*names: str) -> str:
    return "".join(f"- {{name: {name}, url: 'http://{name}:8000'}}\n" for name in names) or "[]\n"


@asynccontextmanager
async def followed(path: Path) -> AsyncIterator[FileDiscovery]:
    discovery = FileDiscovery(path, read, every_s=0.02)
    await discovery.open()
    try:
        yield discovery
    finally:
        await discovery.close()


def names(discovery: FileDiscovery) -> list[str]:
    return [engine.name for engine in discovery.engines]


async def test_a_file_is_read_at_once_and_its_changes_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(listed("a", "b"))
    before = other_tasks()
    async with followed(path) as discovery:
        assert names(discovery) == ["a", "b"]
        answers: list[list[str]] = []
        discovery.on_answer = lambda: answers.append(names(discovery))
        path.write_text(listed("b", "c"))
        await until(lambda: answers)
        assert answers == [["b", "c"]]
        path.write_text(listed())
        await until(lambda: names(discovery) == [])
        assert discovery.notices() == (), "an operator may take all engines out"
    assert other_tasks() == before


@pytest.mark.parametrize("text", ["- {name: a", "nonsense", "[1, 2]", "\0", None])
async def test_a_broken_file_leaves_the_last_list_standing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_files, "STILL_BROKEN_S", 0.4)
    path = tmp_path / "engines.yaml"
    path.write_text(listed("a"))
    async with followed(path) as discovery:
        failures: list[int] = []
        discovery.on_failure = lambda: failures.append(discovery.failures)
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        took_s = await until(lambda: failures)
        assert took_s > followed_files.STILL_BROKEN_S * 0.8, "a file may be incomplete for a moment"
        assert names(discovery) == ["a"]
        (notice,) = discovery.notices()
        said = "it cannot be read: No such file or directory" if text is None else "not a list of engines"
        assert notice.startswith(f"the file {path} fails: ")
        assert said in notice
        assert "\n" not in notice
        assert notice.endswith("stands, with 1 engine")
        await asyncio.sleep(0.1)
        assert len(failures) == 1, "one mistake is one failure"
        path.write_text(listed("a", "b"))
        await until(lambda: names(discovery) == ["a", "b"])
        assert discovery.notices() == ()


async def test_a_missing_file_at_the_start_is_a_notice_and_is_used_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    async with followed(path) as discovery:
        assert names(discovery) == []
        assert discovery.notices() == (
            f"the file {path} has not named any engine yet: it cannot be read: No such file or directory",
        )
        path.write_text(listed("a"))
        await until(lambda: names(discovery) == ["a"])


async def test_a_file_that_is_written_in_pieces_is_used_when_it_is_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_files, "STILL_S", 1.0)  # forty times the pause between two pieces
    path = tmp_path / "engines.yaml"
    path.write_text(listed("a"))
    async with followed(path) as discovery:
        await until(lambda: discovery._file._reported is not None)  # the first content is known to be still
        answers: list[list[str]] = []
        discovery.on_answer = lambda: answers.append(names(discovery))
        for count in range(1, 9):
            path.write_text(listed(*"abcdefgh"[:count]))
            await asyncio.sleep(0.025)
        await until(lambda: answers)
        assert answers == [list("abcdefgh")]


async def test_a_configmap_is_swapped_by_a_link(tmp_path: Path) -> None:
    for folder, engines in (("one", "a"), ("two", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "engines.yaml").write_text(listed(engines))
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "engines.yaml").symlink_to("data/engines.yaml")
    async with followed(tmp_path / "engines.yaml") as discovery:
        assert names(discovery) == ["a"]
        (tmp_path / "next").symlink_to("two")
        os.replace(tmp_path / "next", tmp_path / "data")
        await until(lambda: names(discovery) == ["b"])


async def test_a_reader_with_a_defect_is_a_notice_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(listed("a"))

    def broken(_: Path) -> Sequence[EngineAddress]:
        raise ZeroDivisionError("a defect")

    discovery = FileDiscovery(path, broken, every_s=0.02)
    await discovery.open()
    assert "a defect in the sidecar, see the log: ZeroDivisionError" in discovery.notices()[0]
    await discovery.close()
