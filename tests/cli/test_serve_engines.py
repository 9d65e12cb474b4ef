"""`sidecar serve` with a policy that names its engines: what it says where it cannot begin, or can."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sidecar.engines import Sglang
from tests.fleet.engines import LocalEngine, engines
from tests.fleet.routed import ok, rude, static, write_policy
from tests.support.http import fetch
from tests.support.in_process import in_thread, ran, serving_sidecar
from tests.support.ports import free_ports

pytestmark = pytest.mark.anyio
ANY = ("--port", "0", "--admin-port", "0")


def fails(*arguments: str, ports: tuple[str, ...] = ANY) -> tuple[int, list[str]]:
    """The exit code, and the lines that are not of the log."""
    ended = ran("serve", *arguments, *ports)
    assert ended.stdout == ""
    return ended.returncode, [line for line in ended.stderr.splitlines() if line.startswith("sidecar: ")]


def asked(url: str, method: str = "GET") -> tuple[int, Any]:
    answer = fetch(url, method=method)
    return answer.status, answer.json


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
    assert "give --upstream URL, or write `engines:` in the policy (docs/tutorial-engines.md)" in line


def test_mounted_engines_are_not_behind_a_proxy(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", "  mounted: true")
    text = policy.read_text().splitlines()
    kept = [line for line in text if not line.startswith(("  affinity", "  health", "  replay"))]
    policy.write_text("\n".join(kept))
    code, (line,) = fails("--policy", str(policy))
    assert code == 1
    assert "the policy's engines are mounted (`engines: {mounted: true}`): start the app that mounts" in line


def test_with_both_it_says_which_to_leave_out(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", static("http://127.0.0.1:9"))
    code, (line,) = fails("--policy", str(policy), "--upstream", "http://127.0.0.1:9")
    assert code == 1
    assert "the policy names its engines (`engines:`): leave out --upstream, or remove `engines:`" in line


def test_where_every_engine_is_of_another_kind_it_does_not_begin(tmp_path: Path) -> None:
    with in_thread(engines(2, kind=Sglang)) as found:
        policy = write_policy(tmp_path / "policy.yaml", static(*(f"http://127.0.0.1:{it.port}" for it in found)))
        code, lines = fails("--policy", str(policy))
    assert code == 1
    (line,) = lines
    assert "is SGLang" in line
    assert "SIDECAR_ENGINE_CHECK=alive starts all the same" in line


async def test_where_one_engine_is_of_another_kind_it_begins_without_that_one(tmp_path: Path) -> None:
    a, b = LocalEngine(), LocalEngine(kind=Sglang)
    await a.start()
    await b.start()
    policy = write_policy(tmp_path / "policy.yaml", static(*(f"http://127.0.0.1:{it.port}" for it in (a, b))))
    async with serving_sidecar(policy) as (_, admin):
        body = await becomes(f"{admin}/readyz", 200)
        assert any("engine b gets no requests" in notice and "SGLang" in notice for notice in body["notices"]), body
    await a.stop()
    await b.stop()


async def test_an_engine_list_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy.yaml", "  file: engines.yaml")
    async with rude(ok) as (a,), serving_sidecar(policy) as (_, admin):
        status, body = await asyncio.to_thread(asked, f"{admin}/readyz")
        assert status == 503
        assert "engines.yaml has not named any engine yet" in body["reasons"][0]
        (tmp_path / "engines.yaml").write_text(f"engines: [{{name: a, url: '{a.url}'}}]\n")
        await becomes(f"{admin}/readyz", 200)


async def test_engines_that_answer_and_take_nothing_are_no_readiness(tmp_path: Path) -> None:
    async with rude(ok) as (a,):
        policy = write_policy(tmp_path / "policy.yaml", static(a.url))
        async with serving_sidecar(policy) as (_, admin):
            await becomes(f"{admin}/readyz", 200)
            await asyncio.to_thread(asked, f"{admin}/engines/a/drain", "POST")
            body = await becomes(f"{admin}/readyz", 503)
            assert body["reasons"] == ["no engine takes new requests: a: draining"]
            await asyncio.to_thread(asked, f"{admin}/engines/a/resume", "POST")
            await becomes(f"{admin}/readyz", 200)


@pytest.mark.parametrize("which", [0, 1])
def test_it_refuses_its_own_addresses_as_engines(tmp_path: Path, which: int) -> None:
    ports = free_ports(2)
    policy = write_policy(tmp_path / "policy.yaml", static("http://127.0.0.1:9", f"http://127.0.0.1:{ports + which}"))
    ours = ("--port", str(ports), "--admin-port", str(ports + 1))
    code, (line,) = fails("--policy", str(policy), ports=ours)
    assert code == 1
    assert f"http://127.0.0.1:{ports + which} is this sidecar itself; give the engine's address" in line


async def test_with_no_engine_up_it_begins_and_says_why_it_is_not_ready(tmp_path: Path) -> None:
    port = free_ports(2)
    urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
    policy = write_policy(tmp_path / "policy.yaml", static(*urls))
    async with serving_sidecar(policy) as (_, admin):
        status, body = await asyncio.to_thread(asked, f"{admin}/readyz")
        assert status == 503
        (reason,) = body["reasons"]
        assert reason.startswith("no engine can be used: a: connection refused by ")
        assert all(url in reason for url in urls)
