"""Engines that break every custom, behind a sidecar with several: none costs a client of the others anything."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from tests.fleet.engines import LocalEngine, RudeEngine
from tests.fleet.routed import (
    Act,
    fleet_before,
    ok,
    refusing,
    response,
    routed,
    rude,
    static,
    write_policy,
)
from tests.support.engine import Connection, Received
from tests.support.ports import free_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]


async def endless_refusal(connection: Connection, _: Received) -> None:
    await connection.send(b"HTTP/1.1 503 Full\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        await connection.send_chunk(b"full " * 100)
        await asyncio.sleep(0.001)


async def refusal_without_its_body(connection: Connection, _: Received) -> None:
    await connection.send(b"HTTP/1.1 503 Full\r\ncontent-length: 1000\r\n\r\n")
    await connection.hung_up()
    raise ConnectionResetError


@pytest.mark.parametrize("act", [endless_refusal, refusal_without_its_body])
async def test_a_refusal_is_known_by_its_head_whatever_its_body_does(tmp_path: Path, act: Act) -> None:
    async with fleet_before(tmp_path, act, ok) as (sidecar, _a, _b):
        found = await asyncio.wait_for(sidecar.ask(), 60)
        assert (found.status, found.engine, sidecar.replays) == (200, "b", {"full": 1})


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_a_body_ends_its_request(tmp_path: Path, body: bytes, stream: bool) -> None:
    async def empty(connection: Connection, _: Received) -> None:
        await connection.send(response(body))

    async with fleet_before(tmp_path, empty) as (sidecar, _a):
        found = await sidecar.ask(stream=stream)
        assert (found.status, found.body, found.engine) == (200, body, "a")


async def not_http(connection: Connection, _: Received) -> None:
    await connection.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    connection.close()
    await connection.hung_up()
    raise ConnectionResetError


async def switching(connection: Connection, _: Received) -> None:
    await connection.send(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    await connection.hung_up()
    raise ConnectionResetError


@pytest.mark.parametrize("act", [not_http, switching])
async def test_what_is_no_answer_is_a_break(tmp_path: Path, act: Act) -> None:
    async with fleet_before(tmp_path, act, ok) as (sidecar, _a, _b):
        found = await asyncio.wait_for(sidecar.ask(), 60)
        assert (found.status, found.engine) == (200, "b")


async def test_an_engine_that_accepts_and_closes_at_once_costs_no_client_anything(tmp_path: Path) -> None:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, rude(ok) as (b,):
        policy = write_policy(tmp_path / "policy.yaml", static(url, b.url))
        async with routed(policy) as sidecar:
            found = await asyncio.gather(*(sidecar.ask() for _ in range(20)))
            assert {(reply.status, reply.engine) for reply in found} == {(200, "b")}
            assert sidecar.fleet.members()[0].state.value == "down"


async def test_an_engine_that_begins_to_close_every_connection_is_left_out_within_its_probes(tmp_path: Path) -> None:
    rude_app = RudeEngine()
    a = LocalEngine()
    await a.start(rude_app)
    async with rude(ok) as (b,):
        policy = write_policy(
            tmp_path / "policy.yaml", static(f"http://127.0.0.1:{a.port}", b.url), capacity="{tokens: 1M, requests: 50}"
        )
        async with routed(policy) as sidecar:
            await a.stop()

            async def closing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.close()

            server = await asyncio.start_server(closing, "127.0.0.1", a.port, reuse_address=True)
            async with server:
                member = sidecar.fleet.members()[0]
                statuses = []
                while len(statuses) < 20 or member.state.value != "down":
                    statuses.append((await asyncio.wait_for(sidecar.ask(), 60)).status)
                assert set(statuses) == {200}, "the budget covers what comes before the probes have failed"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_engine_that_restarts_at_its_port_within_50_ms_is_another_one(tmp_path: Path, is_stream: bool) -> None:
    port = free_ports(1)
    first, second = RudeEngine(started_s=time.time() - 1000), RudeEngine(started_s=time.time())
    engine = LocalEngine()
    engine.port = port
    await engine.start(first)
    policy = write_policy(
        tmp_path / "policy.yaml", static(f"http://127.0.0.1:{port}"), capacity="{from: engine, requests: 8}", every="5s"
    )
    async with routed(policy) as sidecar:
        assert sidecar.fleet.members()[0].id == "a#1"
        streams = [sidecar.begin(stream=True) for _ in range(5)]
        await until(lambda: first.chats == 5)
        assert sidecar.held == {"a#1": 5}
        await engine.stop()
        await asyncio.sleep(0.05)
        await engine.start(second)
        found = await asyncio.gather(*streams)
        assert all(reply.error is not None for reply in found), "they had begun"
        await until(lambda: sidecar.fleet.members()[0].id == "a#2")
        await until(lambda: sidecar.held == {})
        assert [state.id for state in sidecar.pool.engines()] == ["a#2"], "the old one's ledger is empty, and gone"
        second.ends.set()
        assert (await sidecar.ask(stream=is_stream)).status == 200
    await engine.stop()


async def test_an_engine_that_crashed_with_thirty_requests_and_is_back_at_once_costs_none_of_them(
    tmp_path: Path,
) -> None:
    """The probe finds it well again: only the start of its process tells that it crashed."""

    class Stuck(RudeEngine):
        async def _chat(self, send: object) -> None:
            self.chats += 1
            await self.ends.wait()

    stuck = Stuck(started_s=time.time() - 1000)
    port = free_ports(1)
    app_server = await _raw_app(stuck, port)
    async with rude(ok) as (b,):
        policy = write_policy(
            tmp_path / "policy.yaml",
            static(f"http://127.0.0.1:{port}")[:-1] + f", {{name: b, url: '{b.url}', capacity: {{requests: 30}}}}]",
            capacity="{from: engine, requests: 30}",
        )
        async with routed(policy) as sidecar:
            sidecar.fleet.drain("b")
            asking = [sidecar.begin() for _ in range(30)]
            await until(lambda: stuck.chats == 30)
            sidecar.fleet.resume("b")
            await asyncio.sleep(0.3)  # a connection that breaks sooner may have been stale, and the proxy opens another
            await app_server.crash()
            again = RudeEngine(started_s=time.time())
            restarted = await _raw_app(again, port)
            found = await asyncio.gather(*asking)
            assert [reply.status for reply in found] == [200] * 30
            assert sidecar.replays == {"crashed": 30}
            await restarted.crash()


class _Crashing:
    """An ASGI app's GET pages over raw connections; a POST counts as a chat that never ends."""

    def __init__(self, app: RudeEngine) -> None:
        self.app = app
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST"):
                    self.app.chats += 1
                    continue
                body = self.app._metrics() if b" /metrics" in head else b'{"data": [{"id": "m", "owned_by": "vllm"}]}'
                writer.write(response(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def crash(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    server: asyncio.Server


async def _raw_app(app: RudeEngine, port: int) -> _Crashing:
    found = _Crashing(app)
    found.server = await asyncio.start_server(found.serve, "127.0.0.1", port, reuse_address=True)
    return found


async def test_a_request_that_crashes_its_engine_meets_two_of_them_at_most_however_fast_they_return(
    tmp_path: Path,
) -> None:
    """A "query of death" that is replayed without end takes a whole fleet down."""
    sent: list[int] = []
    servers: list[asyncio.Server] = []
    port = free_ports(3)

    async def deadly(number: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    if head.startswith(b"POST"):
                        sent.append(number)
                        await asyncio.sleep(0.25)
                        servers[number].close()
                        writer.transport.abort()
                        await asyncio.sleep(0.15)
                        await deadly(number)
                        return
                    writer.write(response(b"{}", "404 Not Found"))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port + number, reuse_address=True)
        servers[number : number + 1] = [server]

    for number in range(3):
        await deadly(number)
    urls = [f"http://127.0.0.1:{port + number}" for number in range(3)]
    async with routed(write_policy(tmp_path / "policy.yaml", static(*urls))) as sidecar:
        found = await asyncio.wait_for(sidecar.ask(), 60)
        assert (found.status, found.code) == (502, "engine_unreachable")
        assert len(sent) == 2
        assert len(set(sent)) == 2
    for server in servers:
        server.close()


async def test_an_engine_that_is_the_sidecar_itself_gets_no_request(tmp_path: Path) -> None:
    """Discovery may name the sidecar's own service: then it would forward each request to itself."""
    port = free_ports(1)
    async with rude(ok) as (b,):
        policy = write_policy(tmp_path / "policy.yaml", static(f"http://127.0.0.1:{port}", b.url))
        async with routed(policy, port=port) as sidecar:
            await until(lambda: sidecar.fleet.members()[0].state.value == "down")
            found = await asyncio.gather(*(sidecar.ask() for _ in range(8)))
            assert {(reply.status, reply.engine) for reply in found} == {(200, "b")}
            await until(lambda: "leads back to the sidecar" in str(sidecar.fleet.members()[0].reason))
            assert "--upstream" not in str(sidecar.fleet.members()[0].reason), "an engine's address is in the policy"


async def test_a_full_fleet_serves_all_when_it_has_room_again(tmp_path: Path) -> None:
    acts = [refusing(503, "retry-after: 1", times=2) for _ in range(2)]
    async with fleet_before(tmp_path, *acts) as (sidecar, _a, _b):
        found = await asyncio.gather(*(sidecar.ask() for _ in range(12)))
        assert [reply.status for reply in found] == [200] * 12
        assert sidecar.replays == {"full": 4}


async def test_an_engine_that_refuses_one_tenant_holds_no_other_tenant_back(tmp_path: Path) -> None:
    """While its requests are refused and come again, the engines still run as many of another tenant's as before."""
    at_engines, refused, most = 0, 0, 0

    async def picky(connection: Connection, request: Received) -> None:
        nonlocal at_engines, refused, most
        if b"bad" in request.body:
            refused += 1
            await connection.send(response(b'{"error": "no"}', "429 Limited", "retry-after: 60"))
            return
        at_engines += 1
        most = max(most, at_engines)
        await asyncio.sleep(0.2)
        at_engines -= 1
        await ok(connection, request)

    digest = hashlib.sha256(b"sk-of-the-refused-one").hexdigest()
    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants" / "bad.yaml").write_text(f'tenant: bad\nkeys: ["sha256:{digest}"]\ntier: high\n')
    async with fleet_before(tmp_path, picky, picky, more="tenants: tenants/*.yaml") as (sidecar, _a, _b):

        async def keeps_asking(text: str, headers: dict[str, str], status: int) -> None:
            while True:
                assert (await sidecar.ask(text, headers)).status == status

        good = asyncio.gather(*(keeps_asking("good", {}, 200) for _ in range(12)))
        await until(lambda: most == 12)
        bad_key = {"authorization": "Bearer sk-of-the-refused-one"}
        bad = asyncio.gather(*(keeps_asking("bad", bad_key, 429) for _ in range(6)))
        await until(lambda: refused > 12)
        most = 0
        await until(lambda: most == 12)
        assert not good.done()
        assert not bad.done()
        for asking in (good, bad):
            asking.cancel()
