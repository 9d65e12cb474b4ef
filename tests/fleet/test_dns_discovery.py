"""Discovery by DNS, before a real DNS server on loopback: SRV in this process, addresses in a network of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import dns.rcode
import pytest

from sidecar.fleet import dns_discovery
from sidecar.fleet.dns_discovery import DnsDiscovery, SrvLookup, SystemLookup
from sidecar.policy.capacity import Capacity
from sidecar.policy.fields import ServiceName
from sidecar.policy.fleet import DnsService
from tests.support.dns_server import ZONE, DnsServer
from tests.support.own_network import run_inside
from tests.support.waiting import open_sockets, other_tasks, until

pytestmark = pytest.mark.anyio
CAPACITY = Capacity(tokens=1000, requests=8)
SERVICE = "_http._tcp.vllm"


@pytest.fixture
def server() -> Iterator[DnsServer]:
    with DnsServer() as server:
        yield server


def named(discovery: DnsDiscovery) -> list[str]:
    return [engine.name for engine in discovery.engines]


@asynccontextmanager
async def followed(server: DnsServer, refresh_s: float = 0.05) -> AsyncIterator[DnsDiscovery]:
    service = DnsService(ServiceName(f"{SERVICE}.{ZONE}", None), refresh_s)
    discovery = DnsDiscovery(service, CAPACITY, 500, resolve=SrvLookup([("127.0.0.1", server.port)]))
    await discovery.open()
    try:
        yield discovery
    finally:
        await discovery.close()


async def test_the_records_of_a_service_are_engines_and_their_changes_are_followed(server: DnsServer) -> None:
    server.set(SERVICE, "SRV", "0 50 8000 b.fleet.test.", "0 50 8001 a.fleet.test.")
    async with followed(server) as discovery:
        assert named(discovery) == ["a.fleet.test:8001", "b.fleet.test:8000"]
        assert [engine.url for engine in discovery.engines] == ["http://a.fleet.test:8001", "http://b.fleet.test:8000"]
        assert {(engine.capacity, engine.prefill, engine.speed) for engine in discovery.engines} == {
            (CAPACITY, 500, 1000)
        }
        answers: list[list[str]] = []
        discovery.on_answer = lambda: answers.append(named(discovery))
        server.ttl_s = 0
        server.set(SERVICE, "SRV", "0 50 8000 b.fleet.test.")
        await until(lambda: answers)
        await asyncio.sleep(0.3)
        assert answers == [["b.fleet.test:8000"]], "the same answer again is no news"


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("nxdomain", "there is no such name (NXDOMAIN)"),
        ("servfail", "every DNS server failed (SERVFAIL or REFUSED)"),
        ("refused", "every DNS server failed (SERVFAIL or REFUSED)"),
        ("empty", "the answer is empty"),
        ("silent", "no answer within 0.3 s"),
    ],
)
async def test_a_failing_or_empty_answer_leaves_the_last_one_standing(
    server: DnsServer, trouble: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set(SERVICE, "SRV", "0 50 8000 a.fleet.test.")
    async with followed(server) as discovery:
        assert discovery.notices() == ()
        failures: list[int] = []
        discovery.on_failure = lambda: failures.append(discovery.failures)
        before = dict(server.records)
        if trouble == "nxdomain":
            server.records.clear()
        elif trouble == "empty":
            server.set(SERVICE, "SRV")
        elif trouble == "silent":
            monkeypatch.setattr(dns_discovery, "LOOKUP_WITHIN_S", 0.3)  # the others are answered, however busy it is
            server.is_silent = True
        else:
            server.rcode = dns.rcode.SERVFAIL if trouble == "servfail" else dns.rcode.REFUSED
        await until(lambda: len(failures) > 1)
        assert named(discovery) == ["a.fleet.test:8000"]
        assert failures[:2] == [1, 2]
        (notice,) = discovery.notices()
        assert notice.startswith(f"DNS for {SERVICE}.{ZONE} fails: {said}; the answer of ")
        assert notice.endswith(" s ago stands, with 1 engine")
        server.records, server.rcode, server.is_silent = before, None, False
        await until(lambda: not discovery.notices())


async def test_before_the_first_answer_there_is_no_engine_and_the_name_is_asked_again_soon(server: DnsServer) -> None:
    async with followed(server, refresh_s=3600) as discovery:
        assert named(discovery) == []
        assert discovery.notices() == (
            f"DNS for {SERVICE}.{ZONE} has not named any engine yet: there is no such name (NXDOMAIN)",
        )
        server.set(SERVICE, "SRV", "0 50 8000 a.fleet.test.")
        await until(lambda: named(discovery))


async def test_two_hundred_records_over_tcp_and_some_of_them_twice(server: DnsServer) -> None:
    texts = [f"0 50 8000 pod-{number:03}.fleet.test." for number in range(200)]
    server.set(SERVICE, "SRV", *texts, *texts[:50])
    async with followed(server) as discovery:
        assert len(named(discovery)) == 200
        assert server.over_tcp >= 1


async def test_only_the_first_priority_counts_and_no_host_is_no_engine(server: DnsServer) -> None:
    server.set(SERVICE, "SRV", "20 50 8000 spare.fleet.test.", "10 50 8000 a.fleet.test.", "10 50 8000 .")
    async with followed(server) as discovery:
        assert named(discovery) == ["a.fleet.test:8000"]


async def test_a_shorter_ttl_is_respected_and_one_of_zero_does_not_ask_without_a_pause(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_discovery, "SHORTEST_S", 0.2)
    server.set(SERVICE, "SRV", "0 50 8000 a.fleet.test.")
    server.ttl_s = 0
    async with followed(server, refresh_s=3600):
        asked = server.queries
        took_s = await until(lambda: server.queries - asked >= 3)
        assert took_s > 2 * 0.9 * 0.2, "a pause between any two"


async def test_a_server_that_is_away_and_junk_are_failures_and_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_discovery, "LOOKUP_WITHIN_S", 0.3)
    before = other_tasks(), open_sockets()
    gone = DnsDiscovery(
        DnsService(ServiceName("x.fleet.test", None), 0.05),
        CAPACITY,
        resolve=SrvLookup([("127.0.0.1", _closed_port())]),
    )
    await gone.open()
    await until(lambda: gone.failures > 2)
    await gone.close()
    await until(lambda: (other_tasks(), open_sockets()) == before)


def _closed_port() -> int:
    with DnsServer() as server:
        return server.port


async def test_a_host_with_other_bytes_than_a_hosts_is_left_out_and_case_makes_no_other_engine(
    server: DnsServer,
) -> None:
    odd = (r"a\"b", r"a\032b", r"a\000b", r"a\\b", "a{b}", r"a\010b")
    server.set(SERVICE, "SRV", "0 50 8000 b.fleet.test.", *(f"0 50 8000 {host}.fleet.test." for host in odd))
    server.ttl_s = 0
    async with followed(server) as discovery:
        assert named(discovery) == ["b.fleet.test:8000"]
        (notice,) = discovery.notices()
        assert notice.startswith(f"DNS for {SERVICE}.{ZONE} names what is no host, and is left out: 'a")
        answers: list[list[str]] = []
        discovery.on_answer = lambda: answers.append(named(discovery))
        server.set(SERVICE, "SRV", "0 50 8000 B.Fleet.test.")
        await until(lambda: not discovery.notices())
        assert (named(discovery), answers) == (["b.fleet.test:8000"], [])


async def test_without_dnspython_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "dns" else real(name, *more))
    with pytest.raises(ValueError, match=r"pip install '\./admission-sidecar\[dns\]'"):
        DnsDiscovery(DnsService(ServiceName("x", None)), CAPACITY)
    DnsDiscovery(DnsService(ServiceName("x", 8000)), CAPACITY)


@pytest.mark.long
def test_the_package_is_used_without_dnspython() -> None:
    code = "import sys; sys.modules['dns'] = None; import sidecar.fleet; assert 'dns.resolver' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- addresses


async def test_localhost_is_an_engine_by_the_systems_resolver() -> None:
    discovery = DnsDiscovery(DnsService(ServiceName("localhost", 8000)), CAPACITY)
    await discovery.open()
    await discovery.close()
    assert named(discovery) == ["127.0.0.1:8000"] or named(discovery) == ["[::1]:8000"]


async def test_a_lookup_that_hangs_does_not_hold_up_the_loop_and_is_not_begun_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[str] = []
    answers = threading.Event()

    def hang(name: str) -> list[str]:
        began.append(name)
        answers.wait(60)
        return ["10.0.0.1"]

    monkeypatch.setattr(dns_discovery, "_addresses", hang)
    monkeypatch.setattr(dns_discovery, "LOOKUP_WITHIN_S", 0.1)
    discovery = DnsDiscovery(DnsService(ServiceName("x", 8000), 0.05), CAPACITY, resolve=SystemLookup())
    await discovery.open()  # returns while it hangs
    await until(lambda: discovery.failures >= 2)
    answers.set()
    await until(lambda: named(discovery) == ["10.0.0.1:8000"])
    await discovery.close()
    assert len(began) == 1


def _outcomes() -> dict[str, Any]:
    """What the system's resolver makes of a DNS server at 127.0.0.1:53, in a network of its own."""
    return dict(json.loads(run_inside("tests.fleet.own_network")))


@pytest.mark.long
def test_addresses_by_the_systems_resolver_before_a_real_server() -> None:
    found = _outcomes()
    assert found["two"] == [["10.0.0.1:8000", "10.0.0.2:8000"], []]
    assert found["ipv6"] == [["[fd00::1]:8000", "[fd00::2]:8000"], []]
    assert found["dual stack"][0] == ["10.0.0.1:8000"]
    assert "also has 2 IPv6 addresses: not used" in found["dual stack"][1][0]
    names, (notice,) = found["nxdomain"]
    assert (names, notice.endswith("stands, with 1 engine")) == (found["dual stack"][0], True), notice
    assert found["back"] == [["10.0.0.9:8000"], []]
