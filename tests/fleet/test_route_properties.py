"""Whatever happens to requests and engines, in any order: the ledgers say what is held, and nothing is left at the end.

The request handler, the routing, the fleet and the pool are real. The engines are an app that does as each step says.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.admission.handover import CALL_KEY, ENGINE_ID_KEY
from sidecar.app import AdmissionMiddleware
from sidecar.engines import speed
from sidecar.engines.robust_line import Line
from sidecar.engines.watch import ENGINE_CHECK_VARIABLE, EngineState
from sidecar.errors import EngineUnreachable, ResponseCut
from sidecar.fleet import routing
from sidecar.fleet.discovery import StaticDiscovery
from sidecar.policy.compiler import load
from sidecar.policy.fleet import EngineAddress
from tests.fleet.routed import Routed, static, write_policy
from tests.support.middleware import Caller

TIERS = ("high", "normal", "batch")
ENGINES = 3
Step = tuple[str, int, str]


class Call:
    """One call of the app: an engine that computes until it is told how it ends."""

    def __init__(self, refuse: Callable[[str], None], scope: Any, receive: Any, send: Any) -> None:
        self.refuse = refuse
        self.engine_id = scope[ENGINE_ID_KEY]
        self.scope, self.receive, self.send = scope, receive, send
        self.has_begun = False
        self.acts: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        await self.receive()
        left = asyncio.ensure_future(self.receive())
        try:
            while True:
                act = asyncio.ensure_future(self.acts.get())
                await asyncio.wait((left, act), return_when=asyncio.FIRST_COMPLETED)
                if not act.done():
                    act.cancel()
                    return  # as a proxy does at a disconnect
                if await self.do(act.result()):
                    return
        finally:
            left.cancel()

    async def do(self, act: str) -> bool:
        """Whether the call has ended."""
        if act == "unsent" and not self.has_begun:
            self.refuse(self.engine_id)
            error = EngineUnreachable("the engine could not be reached", is_connected=False, retry_after_s=1)
            if self.scope[CALL_KEY].failed(error, was_sent=False):
                await self.answer(502)
            return True
        if act == "lost" and not self.has_begun:
            if self.scope[CALL_KEY].failed(EngineUnreachable("it broke off", retry_after_s=1), was_sent=True):
                await self.answer(502)
            return True
        if act in ("cut", "unsent", "lost"):
            if not self.has_begun:
                await self.start(200)
            raise ResponseCut("the engine broke off")
        if act in ("503", "400") and not self.has_begun:
            await self.answer(int(act))
            return True
        if not self.has_begun:
            await self.start(200)
            self.has_begun = True
        is_last = act != "byte"
        await self.send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": not is_last})
        return is_last

    async def start(self, status: int) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"1")]})

    async def answer(self, status: int) -> None:
        await self.start(status)
        await self.send({"type": "http.response.body", "body": b"{}"})


class World:
    """A sidecar, its engines and its clients."""

    def __init__(self, middleware: AdmissionMiddleware) -> None:
        self.stand = Routed(middleware, "", mock.Mock())
        self.middleware = middleware
        self.calls: list[Call] = []
        self.clients: list[tuple[Caller, asyncio.Task[None]]] = []
        self.routes: list[routing.Route] = []
        self.engines: tuple[EngineAddress, ...] = ()
        self.stand.controller.use_app(self.app)
        make: Callable[[Any], routing.Route] = self.stand.routing.route

        def route(request: Any) -> routing.Route:
            self.routes.append(make(request))
            return self.routes[-1]

        self.stand.routing.route = route  # type: ignore[method-assign]

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        call = Call(self.refuse, scope, receive, send)
        self.calls.append(call)
        try:
            await call.run()
        finally:
            self.calls.remove(call)

    def refuse(self, engine_id: str) -> None:
        """As a proxy tells the watch before it answers, where engines are watched."""
        member = self.stand.fleet.member(engine_id)
        if member is not None:
            member.watch._change(EngineState.DOWN, "connection refused")

    def ask(self, tier: str, stream: bool, words: int) -> None:
        body = {
            "model": "m",
            "max_tokens": 5,
            "stream": stream,
            "messages": [{"role": "user", "content": "w " * words}],
        }
        path = "/v1/chat/completions"
        headers = [(b"x-priority", tier.encode())]
        client = Caller(self.middleware, json.dumps(body).encode(), path=path, headers=headers)
        self.clients.append((client, client.begin()))

    async def step(self, kind: str, number: int, what: str) -> None:
        if kind == "ask":
            self.ask(what if what in TIERS else "normal", stream=number % 2 == 0, words=1 + number * 40)
        elif kind == "act" and self.calls:
            self.calls[number % len(self.calls)].acts.put_nowait(what)
        elif kind == "leave" and self.clients:
            self.clients[number % len(self.clients)][0].leave()
        elif kind == "engine":
            self.change_engine(number % ENGINES, what)
        for _ in range(12):
            await asyncio.sleep(0)

    def change_engine(self, number: int, what: str) -> None:
        fleet, name = self.stand.fleet, chr(ord("a") + number)
        member = fleet._members.get(name)
        assert isinstance(fleet.discovery, StaticDiscovery)
        others = [engine for engine in fleet.discovery.engines if engine.name != name]
        if member is None:
            fleet.discovery.change([*others, next(it for it in self.engines if it.name == name)])
        elif what == "down":
            is_down = member.watch.state is EngineState.DOWN
            member.watch._change(EngineState.UP if is_down else EngineState.DOWN, "connection refused")
        elif what == "crash":
            member.watch._change(EngineState.DOWN, "connection refused")
            for call in self.calls:
                if call.engine_id == member.id:
                    call.acts.put_nowait("lost" if not call.has_begun else "cut")
        elif what == "restart":
            member._become(fleet.next_incarnation(name))
        elif what == "gone":
            fleet.discovery.change(others)
        elif what == "cap":
            self.stand.pool.cap_engine(member.id, 0.01, 0)
        elif member.is_draining:
            fleet.resume(name)
        else:
            fleet.drain(name)

    def check(self) -> None:
        """The ledgers are those of the leases, un-prefilled tokens those of calls without a first byte at the most."""
        of_pool = [it.held for it in self.stand.pool._requests.all() if it.held is not None]
        for state in self.stand.pool.engines():
            leases = [it for it in of_pool if it.engine == state.id]
            held = sum(it.ticket.tokens for it in leases), sum(it.ticket.requests for it in leases)
            assert (state.held_tokens, state.held_requests) == held
            assert state.unprefilled_tokens == sum(it.sent for it in leases)
            assert min(state.held_tokens, state.held_requests, state.unprefilled_tokens) >= 0
            assert state.unprefilled_tokens <= sum(it.ticket.prompt for it in leases)
        running = len(self.calls)
        assert len([timer for timer in self.timers() if timer.when() > asyncio.get_running_loop().time()]) <= running

    def timers(self) -> list[asyncio.TimerHandle]:
        """Those of all routes that were not canceled."""
        timers = [route._prefill._timer for route in self.routes if route._prefill is not None]
        return [timer for timer in timers if timer is not None and not timer.cancelled()]

    async def end(self) -> None:
        """Every engine serves again, and every client gets its end."""
        fleet = self.stand.fleet
        assert isinstance(fleet.discovery, StaticDiscovery)
        fleet.discovery.change(self.engines)
        for name in ("a", "b", "c"):
            fleet.resume(name)
        for member in fleet.members():
            member.watch._change(EngineState.UP, None)
        for number in range(3000):
            for call in list(self.calls):
                if call.acts.empty():
                    call.acts.put_nowait("end")
            if all(task.done() for _, task in self.clients):
                break
            await asyncio.sleep(0 if number < 1000 else 0.001)
            if number == 1500:  # what waits for an engine that it broke
                for client, _ in self.clients:
                    client.leave()
        for client, task in self.clients:
            assert task.done(), list(client.sent)
            if task.exception() is not None:
                assert isinstance(task.exception(), ResponseCut)
            statuses = [message["status"] for message in client.sent if message["type"] == "http.response.start"]
            assert len(statuses) <= 1
            assert statuses or client.has_left, "every client that stays gets an answer"
            assert set(statuses) <= {200, 400, 502, 503}
        await self.stand.nothing_left()
        assert not self.timers()
        assert not any(engine.running for engine in self.stand.routing.speeds.engines.values())


async def _run(policy: Path, steps: list[Step]) -> None:
    with mock.patch.dict(os.environ, {ENGINE_CHECK_VARIABLE: "off"}):
        middleware = AdmissionMiddleware(None, load(policy), is_shown=True)
    world = World(middleware)
    await world.stand.fleet.open()
    world.engines = world.stand.fleet.discovery.engines
    for step in steps:
        await world.step(*step)
        world.check()
    await world.end()
    await world.stand.fleet.close()
    await world.stand.pool.close()


ACTS = ("byte", "byte", "end", "end", "503", "400", "unsent", "lost", "cut")
ASK = st.tuples(st.just("ask"), st.integers(0, 20), st.sampled_from(TIERS))
ACT = st.tuples(st.just("act"), st.integers(0, 20), st.sampled_from(ACTS))
LEAVE = st.tuples(st.just("leave"), st.integers(0, 20), st.just(""))
CHANGES = ("restart", "gone", "cap", "drain", "down", "down", "crash")
ENGINE = st.tuples(st.just("engine"), st.integers(0, 2), st.sampled_from(CHANGES))
ROUNDS = st.lists(st.tuples(ASK, ACT, ASK, st.one_of(ENGINE, LEAVE), ACT), min_size=3, max_size=12)


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rounds=ROUNDS, prefill=st.sampled_from(("unbounded", "300")))
def test_ledgers_are_right_at_every_step_and_empty_at_the_end(
    tmp_path: Path, rounds: list[tuple[Step, ...]], prefill: str
) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        static("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"),
        capacity="{tokens: 2k, requests: 2}",
        prefill=prefill,
        affinity="{prefix: true}",
        abort_latency="0s",
    )
    with mock.patch.object(speed, "DEFAULT_FIRST", Line(1.0, 1.0)):
        asyncio.run(_run(policy, [step for steps in rounds for step in steps]))
