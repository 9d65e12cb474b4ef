"""`sidecar sglang-serve`: the real server, here a stand-in's, with the sidecar in its app, in one process and in
two."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.launchers.checks import CannotLaunch
from sidecar.launchers.sglang_priority import hand_over_in
from tests.launchers.conftest import Refusal
from tests.launchers.launched import Launched, launched, many_at_once, ours, write_policy
from tests.support.each import each
from tests.support.ports import free_ports
from tests.support.shared_pools import begun_store
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PRIORITIES = {"critical": 8, "high": 6, "normal": 4, "low": 2, "batch": 0}


@asynccontextmanager
async def sglang(
    folder: Path,
    *arguments: str,
    requests: int = 100,
    capacity: str = "",
    engine: str = "sglang",
    is_by_priority: bool = True,
    **variables: str,
) -> AsyncIterator[Launched]:
    policy = write_policy(folder, engine=engine, requests=requests)
    if capacity:
        policy.write_text(mounted(policy.read_text(), capacity))
    given = ("--policy", str(folder), *(["--enable-priority-scheduling"] if is_by_priority else []), *arguments)
    log = {"STAND_IN_SGLANG_LOG": str(folder / "sglang.log")}
    (folder / "sglang.log").touch()
    async with launched(ours("sglang-serve"), *given, variables={**log, **variables}) as server:
        yield server


def happened(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sglang.log").read_text().splitlines()]


def most_at_once(events: list[dict[str, Any]]) -> int:
    running = most = 0
    for event in sorted(events, key=lambda event: (event["at_s"], event["what"] == "begun")):
        running += {"begun": 1, "ended": -1}[event["what"]]
        most = max(most, running)
    return most


async def ask(server: Launched, tier: str, prompt: str, most: int = 2) -> None:
    messages = [{"role": "user", "content": prompt}]
    status, headers, text = await server.post(CHAT, tier, messages=messages, max_tokens=most)
    assert (status, headers["x-admission-tier"]) == (200, tier), text


@pytest.mark.long
async def test_every_request_of_every_endpoint_carries_its_own_priority(tmp_path: Path) -> None:
    async with sglang(tmp_path) as server:
        expected = await many_at_once(server, PRIORITIES)
        assert {event["prompt"]: event["priority"] for event in happened(tmp_path)} == expected
        await is_aborted_when_its_client_leaves(server, tmp_path)
        # SGLang asks itself when it starts, without a key, at a path that no policy guards by default; a 404 ends it.
        # The stand-in would ask 50 ms after its start; the launcher has it ask nothing.
        await asyncio.sleep(0.2)
        await ask(server, "high", "still there")
        assert "warmup error" not in server.log


async def is_aborted_when_its_client_leaves(server: Launched, folder: Path) -> None:
    body = {"messages": [{"role": "user", "content": "leaving"}], "max_tokens": 1000}
    asking = asyncio.ensure_future(server.client.post(server.url + CHAT, json=body))
    await until(lambda: "leaving" in (folder / "sglang.log").read_text())
    asking.cancel()
    await until(lambda: "aborted" in [event["what"] for event in happened(folder)])


async def test_what_a_client_writes_itself_is_not_what_the_engine_gets(tmp_path: Path) -> None:
    async with sglang(tmp_path) as server:
        status, headers, _ = await server.post("/v1/completions", "low", prompt="one", max_tokens=2, priority=99)
        assert (status, headers["x-admission-ignored"]) == (200, "priority")
        assert {event["priority"] for event in happened(tmp_path)} == {PRIORITIES["low"]}


@pytest.mark.long
async def test_an_engine_that_serves_as_they_come_is_told_no_priority_and_the_start_says_so(tmp_path: Path) -> None:
    """With --abort-on-priority-when-disabled SGLang would answer 503 to each."""
    async with sglang(tmp_path, is_by_priority=False) as server:
        await ask(server, "batch", "any")
        assert {event["priority"] for event in happened(tmp_path)} == {None}
        assert server.log.count("start it with --enable-priority-scheduling") == 1


@pytest.mark.long
async def test_a_policy_without_an_engine_hands_nothing_over(tmp_path: Path) -> None:
    async with sglang(tmp_path, "--default-priority-value", "7", engine="none") as server:
        await ask(server, "batch", "any")
        assert {event["priority"] for event in happened(tmp_path)} == {7}


def changed_manager(change: str) -> type[Any]:
    """A tokenizer manager unlike the one of 0.5.23."""

    class TokenizerManager:
        async def generate_request(self, obj: Any) -> AsyncIterator[None]:
            self._set_default_priority(obj)
            yield None

        def _set_default_priority(self, obj: Any) -> None:
            if self.enable_priority_scheduling:
                obj.priority = 1

        enable_priority_scheduling = True

    class NotCalled(TokenizerManager):
        async def generate_request(self, obj: Any) -> AsyncIterator[None]:
            yield obj

    class OneArgumentMore(TokenizerManager):
        def _set_default_priority(self, obj: Any, more: Any = None) -> None:
            if self.enable_priority_scheduling:
                obj.priority = more

    class ByAnotherName(TokenizerManager):
        def _set_default_priority(self, obj: Any) -> None:
            if self.enable_priority_scheduling:
                obj.urgency = 1

    class Gone:
        async def generate_request(self, obj: Any) -> AsyncIterator[None]:
            yield obj

    classes: dict[str, type[Any]] = {
        "none": TokenizerManager,
        "not called": NotCalled,
        "one argument more": OneArgumentMore,
        "by another name": ByAnotherName,
        "gone": Gone,
    }
    return classes[change]


@each("change", ["not called", "one argument more", "by another name", "gone"])
def test_another_sglang_than_the_one_that_was_read_is_refused(change: str) -> None:
    with pytest.raises(CannotLaunch, match=r"another way than 0\.5\.23: .*_default_priority is missing, changed"):
        hand_over_in(changed_manager(change))
    hand_over_in(changed_manager("none"))


@pytest.mark.long
async def test_its_own_key_is_asked_for_before_the_sidecar(tmp_path: Path) -> None:
    """SGLang adds the check when it starts, behind our import of its app: no one unknown to it takes room."""
    async with sglang(tmp_path, "--api-key", "sk-sglang") as server:
        status, headers, _ = await server.post(CHAT, "batch", messages=[])
        assert status == 401
        assert "x-admission-tier" not in headers


@pytest.mark.long
async def test_two_workers_share_one_pool(tmp_path: Path) -> None:
    """Through a real store: never more at once than the pool has, though each worker alone would admit as many."""
    admin = free_ports(2)
    with begun_store(tmp_path) as store:
        variables = {"SIDECAR_STORE": store.url, "SIDECAR_ADMIN_PORT": str(admin)}
        async with sglang(tmp_path, "--tokenizer-worker-num", "2", requests=3, **variables) as server:
            await until(lambda: server.log.count("Application startup complete") == 2)
            await asyncio.gather(*(ask(server, "normal", f"n{index}", 15) for index in range(60)))
            # The admin pages are the workers' own, each on a port of its own.
            for port in (admin, admin + 1):
                async with server.client.get(f"http://127.0.0.1:{port}/state") as page:
                    assert (await page.json())["pool"]["store"]["replicas"] == 2
    events = happened(tmp_path)
    assert len({event["pid"] for event in events}) == 2
    assert most_at_once(events) == 3


@pytest.mark.long
async def test_its_process_is_an_engine_of_the_pool(tmp_path: Path) -> None:
    async with sglang(tmp_path, capacity="engines: {mounted: true, slow_start: 0s, capacity: {requests: 3}}") as server:
        await asyncio.gather(*(ask(server, "high", f"prompt {index}") for index in range(9)))
        _, headers, _ = await server.post(CHAT, "high", messages=[{"role": "user", "content": "x"}], max_tokens=1)
        assert headers["x-admission-engine"]


def test_several_workers_of_one_mounted_engine_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    policy = write_policy(tmp_path, engine="sglang")
    policy.write_text(mounted(policy.read_text(), "engines: {mounted: true, capacity: {requests: 3}}"))
    said = refusal("sglang-serve", "m", "--policy", str(policy), "--tokenizer-worker-num", "2")
    assert said.startswith("2 server processes share this engine, and with `engines: {mounted: true}` each would offer")


def mounted(policy: str, engines: str) -> str:
    return "\n".join(engines if line.startswith("capacity:") else line for line in policy.splitlines()) + "\n"


def test_several_workers_without_a_store_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    policy = str(write_policy(tmp_path, engine="sglang"))
    said = refusal("sglang-serve", "m", "--policy", policy, "--tokenizer-worker-num", "2")
    assert said.startswith("2 server processes share this engine")
    assert "set SIDECAR_STORE=" in said


@each(
    ("way", "said"),
    [
        ("--enable-http2", "--enable-http2 serves with Granian"),
        ("--grpc-mode", "serves no HTTP"),
        ("SGLANG_RUST_SERVER=1", "SGLANG_RUST_SERVER serves without the Python app"),
        ("SGLANG_HTTP_SERVER_APP_PATH=other:app", "SGLANG_HTTP_SERVER_APP_PATH names another app"),
    ],
)
def test_ways_past_the_sidecar_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, way: str, said: str
) -> None:
    name, is_variable, value = way.partition("=")
    if is_variable:
        monkeypatch.setenv(name, value)
    policy = str(write_policy(tmp_path, engine="sglang"))
    assert said in refusal("sglang-serve", "m", "--policy", policy, *([] if is_variable else [way]))


def test_without_the_engine_it_says_how_to_get_it(tmp_path: Path, refusal: Refusal) -> None:
    said = refusal("sglang-serve", "m", "--policy", str(write_policy(tmp_path, engine="sglang")), installed=False)
    assert "sglang is not installed in this environment" in said
