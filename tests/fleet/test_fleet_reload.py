"""Engines that come and go, and a policy that changes, while requests run: no stream is cut, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import dns.rcode
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.fleet import setup
from sidecar.fleet.dns_discovery import DnsDiscovery, SrvLookup
from sidecar.policy.compiler import load as load_policy
from tests.fleet.routed import Reply, Routed, changed, fleet_before, ok, reset, routed, rude, static, write_policy
from tests.support.dns_server import ZONE, DnsServer
from tests.support.engine import Connection, Received
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]


async def tokens(connection: Connection, _: Received) -> None:
    """A stream of 30 tokens, which takes a third of a second."""
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for _number in range(30):
        await connection.send_chunk(b'data: {"choices": [{"delta": {"content": "w"}}]}\n\n')
        await asyncio.sleep(0.01)
    await connection.send_chunk(b"data: [DONE]\n\n")
    await connection.send_chunk(b"")


@asynccontextmanager
async def load(sidecar: Routed, clients: int = 12) -> AsyncIterator[list[Reply]]:
    """Clients that stream without a pause while the block runs. Fails where one got less than all."""
    found: list[Reply] = []
    is_over = False

    async def client() -> None:
        while not is_over:
            found.append(await sidecar.ask(stream=True))

    clients_running = [asyncio.ensure_future(client()) for _ in range(clients)]
    try:
        yield found
        is_over = True
        await asyncio.gather(*clients_running)
    finally:
        for running in clients_running:
            running.cancel()
    for reply in found:
        assert (reply.status, reply.error, reply.body.count(b"data:")) == (200, None, 31), reply


def since(found: list[Reply], start: int) -> set[str | None]:
    """The engines of the replies from there on."""
    return {reply.engine for reply in found[start:]}


@pytest.mark.long
async def test_a_static_list_that_loses_and_gains_engines_cuts_nothing(tmp_path: Path) -> None:
    async with rude(tokens, tokens, tokens) as stands:
        urls = [stand.url for stand in stands]
        policy = write_policy(tmp_path / "policy.yaml", static(*urls))
        async with routed(policy) as sidecar, load(sidecar) as found:
            await until(lambda: since(found, 0) == {"a", "b", "c"})
            changed(sidecar, write_policy(policy, static(*urls[:2])))
            await until(lambda: [member.name for member in sidecar.fleet.members()] == ["a", "b"])
            count = len(found)
            await until(lambda: len(found) > count + 24)
            assert since(found, count + 12) == {"a", "b"}
            changed(sidecar, write_policy(policy, static(*urls)))
            await until(lambda: "c" in since(found, count + 24))
            assert [member.id for member in sidecar.fleet.members()] == ["a#1", "b#1", "c#2"]
            changed(sidecar, write_policy(policy, static()[:-2] + f"[{{name: z, url: '{urls[0]}'}}]"))
            await until(lambda: "z" in since(found, count))


async def test_other_figures_count_at_once(tmp_path: Path) -> None:
    async with rude(ok, ok) as stands:
        urls = static(*(stand.url for stand in stands))
        policy = write_policy(tmp_path / "policy.yaml", urls)
        async with routed(policy) as sidecar:
            changed(
                sidecar,
                write_policy(
                    policy,
                    urls,
                    affinity="{prefix: true, weight: 4, session: [x-session-id]}",
                    replay="{before_first_byte: 0, budget: 50%}",
                    slow_start="7s",
                    capacity="{tokens: 5k, requests: 3}",
                    prefill="1k",
                    every="1s",
                ),
            )
            await until(lambda: [state.tokens for state in sidecar.pool.engines()] == [5000, 5000])
            routing = sidecar.routing
            assert routing.affinity is not None
            assert sidecar.pool._rules.affinity_percent == 400
            assert (routing.most_breaks, float(routing.budget.share)) == (0, 0.5)
            assert (sidecar.fleet.policy.slow_start_s, sidecar.fleet.policy.health.every_s) == (7, 1)
            found = [(state.tokens, state.requests, state.effective_prefill) for state in sidecar.pool.engines()]
            assert found == [(5000, 3, 1000)] * 2
            assert (await sidecar.ask()).status == 200


async def test_replays_that_are_turned_off_while_a_request_runs(tmp_path: Path) -> None:
    async with fleet_before(tmp_path, reset, ok) as (sidecar, a, b):
        asking = sidecar.begin()
        await until(lambda: a.count == 1)
        urls = static(a.url, b.url)
        changed(sidecar, write_policy(tmp_path / "policy.yaml", urls, replay="{before_first_byte: 0}"))
        assert (await asking).status == 502


async def test_a_ticket_that_no_engine_of_the_new_list_could_hold_gets_a_400(tmp_path: Path) -> None:
    async with rude(ok) as (a,):
        large = static(a.url) + "\n  drain_timeout: 1m"
        policy = write_policy(tmp_path / "policy.yaml", large, capacity="{tokens: 10k, requests: 8}")
        async with routed(policy) as sidecar:
            sidecar.fleet.drain("a")
            asking = sidecar.begin(max_tokens=8000)
            await until(lambda: sidecar.waiting == 1)
            changed(sidecar, write_policy(policy, large, capacity="{tokens: 1k, requests: 8}"))
            reply = await asyncio.wait_for(asking, 60)
            assert (reply.status, reply.code) == (400, "request_too_large")


@pytest.mark.long
async def test_engines_that_dns_names_are_followed_and_its_failure_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_http._tcp.engines"
    async with rude(tokens, tokens) as stands:
        with DnsServer() as server:
            records = [f"0 50 {stand.raw.port} localhost." for stand in stands]
            server.ttl_s = 0
            server.set(name, "SRV", records[0])
            lookup = SrvLookup([("127.0.0.1", server.port)])
            with monkeypatch.context() as patched:
                patched.setattr(setup, "DnsDiscovery", partial(DnsDiscovery, resolve=lookup))
                source = f"  dns: {{name: {name}.{ZONE}, refresh: 1s}}"
                policy = write_policy(tmp_path / "policy.yaml", source)
                middleware = AdmissionMiddleware(None, load_policy(policy), is_shown=True)
            async with routed(middleware) as sidecar, load(sidecar, 6) as found:
                await until(lambda: len(found) > 3)
                server.set(name, "SRV", *records)
                await until(lambda: len(since(found, 0)) == 2)
                server.rcode = dns.rcode.SERVFAIL
                await until(lambda: sidecar.fleet.discovery.failures > 1)
                assert len(sidecar.fleet.members()) == 2
                assert any("the answer of" in notice for notice in sidecar.controller.notices())
                server.rcode = None
                server.set(name, "SRV", records[1])
                await until(lambda: len(sidecar.fleet.members()) == 1)
                changed(sidecar, write_policy(policy, source, capacity="{tokens: 7k, requests: 7}"))
                await until(lambda: [state.requests for state in sidecar.pool.engines()] == [7])
