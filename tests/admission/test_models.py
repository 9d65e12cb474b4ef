"""The front of several models' pools: which pool, what it says of all, and the dry run. `tests.test_models` has the
real processes.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.engines.watch import EngineState
from sidecar.fleet.models import ModelsHealth
from sidecar.policy.compiler import load
from tests.admission.models import CHAT, served_models
from tests.fleet.engines import RudeEngine
from tests.support.middleware import answer
from tests.support.waiting import open_sockets, other_tasks, until

pytestmark = pytest.mark.anyio
TWO = "{m: {engines: [a], aliases: [em]}, n: {engines: [b]}}"


async def test_the_only_model_serves_requests_that_name_none(tmp_path: Path) -> None:
    async with served_models(tmp_path, "{m: {aliases: [em]}}") as sidecar:
        for name in (None, "", "m", "em"):
            status, engine, _ = await sidecar.ask(name)
            assert (status, engine in ("a", "b")) == (200, True)
        status, _, answer = await sidecar.ask("n")
        assert (status, answer["error"]["message"]) == (404, 'no pool serves the model "n"; send one of m')


async def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    tasks, sockets = other_tasks(), open_sockets()
    async with served_models(tmp_path, TWO) as sidecar:
        assert [(await sidecar.ask(model))[1] for model in ("m", "n", "em")] == ["a", "b", "a"]
    await until(lambda: (other_tasks(), open_sockets()) == (tasks, sockets))


async def test_engines_of_an_engine_list_belong_to_their_models(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO, 3, listed=True) as sidecar:
        assert [(await sidecar.ask(model))[1] for model in ("m", "n")] == ["a", "b"]
        pools = sidecar.front.state()["models"]
        assert [pool["pool"]["capacity"]["requests"] for pool in pools.values()] == [2, 2]  # type: ignore[attr-defined]
        moved = (tmp_path / "policy.yaml").read_text().replace("engines: [b]", "engines: [c]")
        (tmp_path / "policy.yaml").write_text(moved)
        sidecar.front.change_policy(load(tmp_path / "policy.yaml"))
        fleet = sidecar.front.controllers["n"].routing.fleet  # type: ignore[union-attr]
        await until(lambda: [member.name for member in fleet.members()] == ["c"])
        assert (await sidecar.ask("n"))[1] == "c"


async def test_each_model_has_its_own_service_gain(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO, max_wait="30s}, slo: {ttft: 30s, tpot: 5s") as sidecar:
        assert (await sidecar.ask("m"))[0] == 200
        state: Any = sidecar.front.state()
        assert "gain" not in state
        (tier,) = state["models"]["m"]["gain"]["tiers"]
        assert (tier["outcomes"]["met"], tier["earned"]) == (1, 2)
        assert [engine["engine"] for engine in state["models"]["m"]["gain"]["engines"]] == ["a"]
        assert state["models"]["n"]["gain"] == {"tiers": [], "engines": []}


async def test_a_request_of_no_pool_ends_in_none(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO) as sidecar:
        for model, status in (("x", 404), (None, 400)):
            assert (await sidecar.ask(model))[0] == status
        assert sidecar.front.under_way == 0
        assert [one.pool.state()["waiting"] for one in sidecar.front.controllers.values()] == [0, 0]


async def test_the_end_of_a_wait_is_about_its_own_models_engines(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO, max_wait="300ms") as sidecar:
        await sidecar.engines[1].stop()
        await until(lambda: not sidecar.front.controllers["n"].engine_watch.is_usable)
        status, _, answer = await sidecar.ask("n")
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert (await sidecar.ask("m"))[0] == 200
        assert sidecar.front.readiness() == []
        assert sidecar.front.engine_watch.is_usable
        assert sidecar.front.notices()[0].startswith("model n: no engine can be used: b: ")
        await sidecar.engines[0].stop()
        await until(lambda: len(sidecar.front.readiness()) == 2)
        assert (sidecar.front.engine_watch.state, sidecar.front.engine_watch.up) == (EngineState.DOWN, 0)


@pytest.mark.parametrize(
    ("body", "engine"),
    [
        (b'{"model": "n", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}', "b"),
        (b'{"model": "em", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}', "a"),
        (b'{"model": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}', "a"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}', "a"),
        (b'{"model": "n", "messages": [{"role": "user", "content": "' + b"x" * 70_000 + b'"}], "max_tokens": 2}', "a"),
    ],
)
async def test_the_dry_run_passes_each_body_unchanged(tmp_path: Path, body: bytes, engine: str) -> None:
    async with served_models(tmp_path, TWO, mode="observe") as sidecar:
        before = [await requests_of(one.port) for one in sidecar.engines]

        async def parts() -> Any:
            for start in range(0, len(body), 30_000):
                yield body[start : start + 30_000]
                await asyncio.sleep(0.01)

        async with sidecar.client.post(CHAT, data=parts()) as response:
            answer = await response.json()
            assert (response.status, response.headers["x-admission-mode"]) == (200, "observe"), answer
        assert answer["model"] == json.loads(body).get("model", "emulated")
        after = [await requests_of(one.port) for one in sidecar.engines]
        assert [now - then for now, then in zip(after, before, strict=True)] == [engine == "a", engine == "b"]
        assert sidecar.front.under_way == 0


@pytest.mark.parametrize(("mode", "stopped", "status"), [("enforce", 0, 200), ("observe", 1, 502)])
async def test_a_compressed_body_goes_to_its_models_engine(
    tmp_path: Path, mode: str, stopped: int, status: int
) -> None:
    body = gzip.compress(b'{"model": "n", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}')
    async with served_models(tmp_path, TWO, mode=mode) as sidecar:
        await sidecar.engines[stopped].stop()
        async with sidecar.client.post(CHAT, data=body, headers={"content-encoding": "gzip"}) as response:
            assert response.status == status


@pytest.mark.parametrize(
    ("body", "engine"),
    [
        ({"model": "n", "prompt": "x"}, "b"),
        ({"model": "em", "prompt": "x"}, "a"),
        ({"model": "x", "prompt": "x"}, "a"),
        ({"model": 7}, "a"),
        ({"model": "n", "prompt": "x" * 200_000}, "a"),
        ([], "a"),
    ],
)
async def test_a_harmless_path_goes_to_its_models_engine(tmp_path: Path, body: Any, engine: str) -> None:
    async with served_models(tmp_path, TWO) as sidecar:
        for name, one in zip("ab", sidecar.engines, strict=True):
            await one.stop()
            await one.start(Counting(name))
        health = sidecar.front.engine_watch
        await until(lambda: all(one.engine_watch.is_usable for one in sidecar.front.controllers.values()))
        assert health.is_usable
        async with sidecar.client.post("/tokenize", json=body) as response:
            assert await response.json() == {"engine": engine, "bytes": len(json.dumps(body))}
        async with sidecar.client.post("/tokenize", json=body, headers={"authorization": "Bearer x"}) as response:
            assert response.status == 401
        async with sidecar.client.post("/v1/embeddings", json=body) as response:
            assert (await response.json())["error"]["code"] == "not_guarded"


async def test_no_body_is_read_of_a_client_without_a_key(tmp_path: Path) -> None:
    async def begun() -> Any:
        yield b'{"model": "n", "prompt": "'
        await asyncio.sleep(30)

    async with served_models(tmp_path, TWO) as sidecar:
        headers = {"authorization": "Bearer x"}
        asked = sidecar.client.post("/tokenize", data=begun(), headers=headers)
        response = await asyncio.wait_for(asked, 60)
        async with response:
            assert response.status == 401


class Counting:
    """A vLLM that also counts what it gets at `/tokenize`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = RudeEngine()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/tokenize":
            await self.engine(scope, receive, send)
            return
        size, message = 0, await receive()
        while message["type"] == "http.request":
            size += len(message["body"])
            if not message["more_body"]:
                break
            message = await receive()
        await answer(send, json.dumps({"engine": self.name, "bytes": size}).encode())


async def requests_of(port: int) -> int:
    import aiohttp

    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/metrics") as page:
        lines = (await page.text()).splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total")))


class Watch:
    """A model's engines in a given state."""

    def __init__(self, state: EngineState) -> None:
        self.on_change: list[Any] = []
        self.state = state
        self.is_usable = state in (EngineState.UP, EngineState.UNKNOWN)
        self.up = None if state is EngineState.UNKNOWN else int(state is EngineState.UP)
        self.for_s = 1.0

    def readiness(self) -> list[str]:
        return [] if self.is_usable else [f"it is {self.state.value}"]


UP, DOWN, UNKNOWN, MISMATCH = EngineState.UP, EngineState.DOWN, EngineState.UNKNOWN, EngineState.MISMATCH


@pytest.mark.parametrize(
    ("states", "state", "up"),
    [
        ((UP, UP), UP, 1),
        ((UP, DOWN), UP, 1),
        ((DOWN, UNKNOWN), UNKNOWN, None),
        ((UP, UNKNOWN), UP, 1),
        ((MISMATCH, DOWN), DOWN, 0),
        ((MISMATCH, MISMATCH), MISMATCH, 0),
        ((DOWN, DOWN), DOWN, 0),
    ],
)
def test_the_health_of_all_models(states: tuple[EngineState, ...], state: EngineState, up: int | None) -> None:
    health = ModelsHealth({str(number): Watch(one) for number, one in enumerate(states)})  # type: ignore[misc]
    assert (health.state, health.up) == (state, up)
    assert health.is_usable is (up != 0)
    assert bool(health.readiness()) is (up == 0)
