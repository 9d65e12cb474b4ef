"""`sidecar engines` as an operator, or a preStop hook, runs it: before a real sidecar with emulated engines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.fleet.served import ServedFleet, served_fleet
from tests.support.in_process import complaint, ran, served_sidecar
from tests.support.middleware import write_policy

pytestmark = pytest.mark.anyio
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with served_fleet(folder, 2, 4, "--step-ms", "20") as served:
        yield served


def said(fleet: ServedFleet, *arguments: str) -> tuple[int, str, str]:
    ended = ran("engines", *arguments, "--admin", fleet.admin)
    return ended.returncode, ended.stdout.strip(), ended.stderr.strip()


@pytest.mark.long
def test_a_table_of_the_engines(fleet: ServedFleet) -> None:
    code, out, _ = said(fleet, "list")
    head, first, second = (line.split() for line in out.splitlines())
    assert (code, head[:4]) == (0, ["ENGINE", "STATE", "TOKENS", "REQUESTS"])
    assert first[:8] == ["e0#1", "ready", "0", "of", "20k", "0", "of", "4"]
    assert second[0] == "e1#1"
    code, out, _ = said(fleet, "list", "--json", "-")
    assert (code, [row["id"] for row in json.loads(out)["engines"]]) == (0, ["e0#1", "e1#1"])


@pytest.mark.long
async def test_a_drain_returns_when_the_engine_has_sent_its_last_byte(fleet: ServedFleet) -> None:
    async with aiohttp.ClientSession() as client:
        asks = [asyncio.create_task(fleet.ask(client, output=100)) for _ in range(4)]
        await fleet.in_flight(client, 4)
        began_s = time.monotonic()
        drained = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidecar.cli", "engines", "drain", "e0", "--wait", "--admin", fleet.admin),
            stdout=subprocess.PIPE,
        )
        assert (await drained.communicate())[0] == b"engine e0 is empty, and gets no new requests\n"
        assert time.monotonic() - began_s > 1.0
        row = (await fleet.rows(client))["e0"]
        assert (row["in_flight"], row["held"], row["state"]) == (0, {"tokens": 0, "requests": 0}, "draining")
        answers = [*(await asyncio.gather(*asks)), *[await fleet.ask(client) for _ in range(3)]]
        assert [answer.status for answer in answers] == [200] * 7
        assert {answer.headers["x-admission-engine"] for answer in answers[4:]} == {"e1"}
        assert {answer.headers["x-admission-engine"] for answer in answers[:4]} == {"e0", "e1"}


def test_a_resume_and_the_sentences_of_each(fleet: ServedFleet) -> None:
    assert said(fleet, "drain", "e0")[1] in (
        "engine e0 gets no new requests; it holds 0 requests (0 tokens) now",
        "engine e0 is empty, and gets no new requests",
    )
    assert said(fleet, "resume", "e0")[:2] == (0, "engine e0 takes requests again; it is ready")
    assert said(fleet, "resume", "e0")[:2] == (0, "engine e0 takes requests again; it is ready")
    code, out, err = said(fleet, "drain", "e9")
    assert (code, out) == (1, "")
    assert err == "sidecar engines: no engine is called 'e9'; the engines are e0, e1"


async def test_a_wait_that_is_too_long_ends_with_a_sentence(fleet: ServedFleet) -> None:
    async with aiohttp.ClientSession() as client:
        asks = [asyncio.create_task(fleet.ask(client, output=5000)) for _ in range(2)]
        await fleet.in_flight(client, 2)
        try:
            drain = ("engines", "drain", "e0", "--wait", "--timeout", "100ms", "--admin", fleet.admin)
            ended = await asyncio.to_thread(ran, *drain)
            assert ended.returncode == 1
            said = "sidecar engines: engine e0 is not empty after 100 ms: it holds 1 requests ("
            assert ended.stderr.startswith(said)
        finally:
            async with client.post(f"{fleet.admin}/engines/e0/resume") as response:
                assert response.status == 200
            for each in asks:
                each.cancel()
            await asyncio.gather(*asks, return_exceptions=True)


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("drain",), "drain needs the engine's name"),
    (("resume",), "resume needs the engine's name"),
    (("list", "e0"), "list takes no engine"),
    (("list", "--wait"), "list takes no engine, no --wait"),
    (("resume", "e0", "--wait"), "resume takes no --wait"),
    (("drain", "e0", "--timeout", "1s"), "--timeout is for --wait"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_a_wrong_command_line_asks_nothing(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in complaint("engines", *arguments, "--admin", "http://127.0.0.1:9", code=2)


def test_a_sidecar_of_one_engine_says_so(tmp_path: Path) -> None:
    with served_sidecar(write_policy(tmp_path), NOBODY) as (_, admin):
        ended = ran("engines", "list", "--admin", admin)
    assert ended.returncode == 1
    assert "this pool has one engine: its policy has no `engines`" in ended.stderr
