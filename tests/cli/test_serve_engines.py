"""`sidecar serve` with a policy that names its engines, as a process: what it says where it cannot begin, or can."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sidecar.engines import Sglang
from tests.fleet.engines import LocalEngine, engines
from tests.fleet.routed import ok, rude, static, write_policy
from tests.support.commands import address, command
from tests.support.ports import free_ports

pytestmark = pytest.mark.anyio
ANY = ("--port", "0", "--admin-port", "0")


def fails(*arguments: str) -> tuple[int, list[str]]:
    """The exit code, and the lines that are not of the log."""
    with command("serve", *arguments, *ANY) as process:
        out, said = process.communicate(timeout=60)
    assert out == "", out
    return process.returncode, [line for line in said.splitlines() if line.startswith("sidecar: ")]


def asked(url: str, method: str = "GET") -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def becomes(url: str, status: int) -> Any:
    """Asks until it answers with this status."""
    for _ in range(200):
        found, body = await asyncio.to_thread(asked, url)
        if found == status:
            return body
        await asyncio.sleep(0.1)
    raise AssertionError((found, body))


def test_without_an_engine_it_says_both_ways_to_name_one(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("engine: vllm\ncapacity: {tokens: 100k}\ntiers: {normal: {}}\nanonymous: normal\n")
    code, (line,) = fails("--policy", str(policy))
    assert code == 1
    assert "give --upstream URL, or write `engines:` in the policy (docs/several-engines.md)" in line


def test_mounted_engines_are_not_behind_a_proxy(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", "  mounted: true")
    text = policy.read_text().splitlines()
    kept = [line for line in text if not line.startswith(("  affinity", "  health", "  replay"))]
    policy.write_text("\n".join(kept))
    code, (line,) = fails("--policy", str(policy))
    assert code == 1
    assert "the policy's engines are mounted (`engines: {mounted: true}`): start the app that mounts" in line


@pytest.mark.long
def test_with_both_it_says_which_to_leave_out(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", static("http://127.0.0.1:9"))
    code, (line,) = fails("--policy", str(policy), "--upstream", "http://127.0.0.1:9")
    assert code == 1
    assert "the policy names its engines (`engines:`): leave out --upstream, or remove `engines:`" in line


@pytest.mark.long
async def test_where_every_engine_is_of_another_kind_it_does_not_begin(tmp_path: Path) -> None:
    async with engines(2, kind=Sglang) as found:
        policy = write_policy(tmp_path / "policy.yaml", static(*(f"http://127.0.0.1:{it.port}" for it in found)))
        code, lines = await asyncio.to_thread(fails, "--policy", str(policy))
    assert code == 1
    (line,) = lines
    assert "is SGLang" in line
    assert "SIDECAR_ENGINE_CHECK=alive starts all the same" in line


@pytest.mark.long
async def test_where_one_engine_is_of_another_kind_it_begins_without_that_one(tmp_path: Path) -> None:
    a, b = LocalEngine(), LocalEngine(kind=Sglang)
    await a.start()
    await b.start()
    policy = write_policy(tmp_path / "policy.yaml", static(*(f"http://127.0.0.1:{it.port}" for it in (a, b))))
    with command("serve", "--policy", str(policy), *ANY) as process:
        await asyncio.to_thread(address, process)
        admin = await asyncio.to_thread(address, process)
        body = await becomes(f"{admin}/readyz", 200)
        assert any("engine b gets no requests" in notice and "SGLang" in notice for notice in body["notices"]), body
    await a.stop()
    await b.stop()


@pytest.mark.long
async def test_an_engine_list_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", "  file: engines.yaml")
    async with rude(ok) as (a,):
        with command("serve", "--policy", str(policy), *ANY) as process:
            await asyncio.to_thread(address, process)
            admin = await asyncio.to_thread(address, process)
            status, body = await asyncio.to_thread(asked, f"{admin}/readyz")
            assert status == 503
            assert "engines.yaml has not named any engine yet" in body["reasons"][0]
            (tmp_path / "engines.yaml").write_text(f"engines: [{{name: a, url: '{a.url}'}}]\n")
            await becomes(f"{admin}/readyz", 200)


@pytest.mark.long
async def test_engines_that_answer_and_take_nothing_are_no_readiness(tmp_path: Path) -> None:
    async with rude(ok) as (a,):
        policy = write_policy(tmp_path / "policy.yaml", static(a.url))
        with command("serve", "--policy", str(policy), *ANY) as process:
            await asyncio.to_thread(address, process)
            admin = await asyncio.to_thread(address, process)
            await becomes(f"{admin}/readyz", 200)
            await asyncio.to_thread(asked, f"{admin}/engines/a/drain", "POST")
            body = await becomes(f"{admin}/readyz", 503)
            assert body["reasons"] == ["no engine takes new requests: a: draining"]
            await asyncio.to_thread(asked, f"{admin}/engines/a/resume", "POST")
            await becomes(f"{admin}/readyz", 200)


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 1])
def test_it_refuses_its_own_addresses_as_engines(tmp_path: Path, which: int) -> None:
    ports = free_ports(2)
    policy = write_policy(tmp_path / "policy.yaml", static("http://127.0.0.1:9", f"http://127.0.0.1:{ports + which}"))
    arguments = ("--policy", str(policy), "--port", str(ports), "--admin-port", str(ports + 1))
    with command("serve", *arguments) as process:
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert f"http://127.0.0.1:{ports + which} is this sidecar itself; give the engine's address" in said


@pytest.mark.long
async def test_with_no_engine_up_it_begins_and_says_why_it_is_not_ready(tmp_path: Path) -> None:
    port = free_ports(2)
    urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
    policy = write_policy(tmp_path / "policy.yaml", static(*urls))
    with command("serve", "--policy", str(policy), *ANY) as process:
        await asyncio.to_thread(address, process)
        admin = await asyncio.to_thread(address, process)
        status, body = await asyncio.to_thread(asked, f"{admin}/readyz")
        assert status == 503
        (reason,) = body["reasons"]
        assert reason.startswith("no engine can be used: a: connection refused by ")
        assert all(url in reason for url in urls)
