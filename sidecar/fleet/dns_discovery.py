"""Discovery by DNS: the addresses of a name (A, AAAA), or the hosts and ports of a service (SRV).

Addresses come from the system's resolver, as every other program's do: it follows /etc/hosts and search domains, and
says no TTL. A name beside which no port is written is a service; its SRV records are read by dnspython. A failing or
an empty answer changes nothing: no engine is lost because a DNS server restarts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import random
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from sidecar.extras import how_to_install
from sidecar.fleet.discovery import FollowedDiscovery
from sidecar.policy.capacity import Capacity
from sidecar.policy.fleet import DnsService, EngineAddress
from sidecar.policy.rules import UNLIMITED

if TYPE_CHECKING:
    import dns.asyncresolver

LOOKUP_WITHIN_S = 5.0
"""A server answers in milliseconds. glibc asks again after 5 s: what took longer counts as failed until then."""
SHORTEST_S = 1.0
"""A TTL of 0 does not make the sidecar ask without a pause."""
MISSING = (
    "SRV records are read by dnspython, which is not installed: write a port beside the name, whose addresses are then "
    f"looked up, or {how_to_install('dns')}"
)

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
"""A host that can be an engine. A label of DNS may have any bytes: quotes, blanks or a null would get into the store's
texts, into addresses, and into metrics."""

V = TypeVar("V")


class Lookup(NamedTuple):
    """An answer: hosts with their ports, and for how many seconds it may be used; None where that is not known."""

    hosts: tuple[tuple[str, int], ...]
    ttl_s: float | None = None
    remark: str | None = None


class LookupFailed(Exception):
    """No answer, or one that names no engine. The message is one line, for people."""


Resolve: TypeAlias = Callable[[DnsService], Awaitable[Lookup]]


class DnsDiscovery(FollowedDiscovery):
    """The engines of one name, looked up every `service.refresh_s`, or as often as a shorter TTL says.

    Each engine is named by its address and port, `10.0.0.7:8000` or `[fd00::7]:8000`, or for SRV by its host and port.
    All have the same `capacity` and `prefill`. Raises ValueError where dnspython is needed and missing. `resolve` is
    for tests.
    """

    def __init__(
        self,
        service: DnsService,
        capacity: Capacity,
        prefill: int = UNLIMITED,
        *,
        resolve: Resolve | None = None,
    ) -> None:
        super().__init__(f"DNS for {service}")
        self._service = service
        self._capacity = capacity
        self._prefill = prefill
        self._resolve = resolve or (SystemLookup() if service.port is not None else SrvLookup())

    async def look_once(self) -> Sequence[EngineAddress]:
        """The engines that DNS names now. Raises LookupFailed."""
        return self._name_engines(await self._lookup())

    def change(self, capacity: Capacity, prefill: int) -> None:
        """Every engine has another capacity from now on."""
        self._capacity, self._prefill = capacity, prefill
        if self.engines:
            self._answered([self._engine(engine.name) for engine in self.engines], self._remark)

    async def _look(self) -> float:
        refresh_s = self._service.refresh_s
        try:
            found = await self._lookup()
        except LookupFailed as trouble:
            self._failed(str(trouble))
            refresh_s = refresh_s if self.engines else min(refresh_s, SHORTEST_S)
        else:
            self._answered(self._name_engines(found), found.remark)
            if found.ttl_s is not None:
                refresh_s = min(refresh_s, max(SHORTEST_S, found.ttl_s))
        return refresh_s * random.uniform(0.9, 1)  # many replicas do not ask at one moment

    async def _lookup(self) -> Lookup:
        found = await self._resolve(self._service)
        if not found.hosts:
            raise LookupFailed("the answer is empty")
        return found

    def _name_engines(self, found: Lookup) -> list[EngineAddress]:
        return [self._engine(name) for name in sorted({_name(host, port) for host, port in found.hosts})]

    def _engine(self, name: str) -> EngineAddress:
        return EngineAddress(name, f"http://{name}", self._capacity, self._prefill)


class SystemLookup:
    """The A and AAAA records of a name, by the system's resolver, each lookup in a thread of its own.

    Of a name with addresses of both families the IPv4 ones are used: a dual-stack engine has one of each, and would
    count twice.
    """

    def __init__(self) -> None:
        self._running: asyncio.Future[list[str]] | None = None

    async def __call__(self, service: DnsService) -> Lookup:
        """Raises LookupFailed."""
        assert service.port is not None
        if self._running is None:  # else an answer that came late is used now
            self._running = _in_thread(lambda: _addresses(service.name))
        running = self._running
        await asyncio.wait((running,), timeout=LOOKUP_WITHIN_S)
        if not running.done():
            raise LookupFailed(f"no answer within {LOOKUP_WITHIN_S:g} s")
        self._running = None
        try:
            found = running.result()
        except (OSError, UnicodeError) as error:
            raise LookupFailed(getattr(error, "strerror", None) or str(error)) from None
        fourth = [address for address in found if ":" not in address]
        left_out = len(found) - len(fourth) if fourth else 0
        remark = (
            f"DNS for {service} also has {left_out} IPv6 addresses: not used, as beside IPv4 ones they are usually "
        )
        hosts = tuple((address, service.port) for address in fourth or found)
        return Lookup(hosts, remark=remark + "those of the same engines" if left_out else None)


class SrvLookup:
    """The SRV records of a service, by dnspython. Only the hosts of the first priority are used (RFC 2782).

    `nameservers` are pairs of address and port, None for the system's. Raises ValueError where dnspython is missing.
    """

    def __init__(self, nameservers: Sequence[tuple[str, int]] | None = None) -> None:
        if importlib.util.find_spec("dns") is None:
            raise ValueError(MISSING)
        self._nameservers = nameservers
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def __call__(self, service: DnsService) -> Lookup:
        """Raises LookupFailed."""
        import dns.exception
        import dns.rdatatype
        import dns.resolver

        try:
            self._resolver = self._resolver or self._make_resolver()
            answer = await self._resolver.resolve(
                service.name, dns.rdatatype.SRV, search=True, lifetime=LOOKUP_WITHIN_S, raise_on_no_answer=False
            )
        except dns.resolver.NXDOMAIN:
            raise LookupFailed("there is no such name (NXDOMAIN)") from None
        except dns.resolver.NoNameservers:
            raise LookupFailed("every DNS server failed (SERVFAIL or REFUSED)") from None
        except dns.exception.Timeout:
            raise LookupFailed(f"no answer within {LOOKUP_WITHIN_S:g} s") from None
        except (dns.exception.DNSException, OSError, EOFError, ValueError) as error:
            raise LookupFailed(f"{type(error).__name__}: {error}") from None
        # DNS ignores case, and some servers answer in the case of the question, which differs each time.
        records = [(one.priority, str(one.target).rstrip(".").lower(), one.port) for one in answer.rrset or ()]
        first = min((priority for priority, _, _ in records), default=0)
        named = [(host, port) for priority, host, port in records if priority == first and host and port]
        hosts = tuple((host, port) for host, port in named if _HOST.fullmatch(host))
        left_out = sorted({host for host, _ in named if not _HOST.fullmatch(host)})
        remark = f"DNS for {service} names what is no host, and is left out: {left_out[0]!a}" if left_out else None
        return Lookup(hosts, None if answer.rrset is None else float(answer.rrset.ttl), remark)

    def _make_resolver(self) -> dns.asyncresolver.Resolver:
        import dns.asyncresolver
        import dns.nameserver

        resolver = dns.asyncresolver.Resolver(configure=self._nameservers is None)
        if self._nameservers is not None:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in self._nameservers]
        return resolver


def _addresses(name: str) -> list[str]:
    """The addresses of a name. Those that hold for one network card only are no engine's."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = {str(entry[4][0]) for entry in found if entry[0] in (socket.AF_INET, socket.AF_INET6)}
    return sorted(address for address in addresses if "%" not in address)


def _name(host: str, port: int) -> str:
    with suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            return f"[{host}]:{port}"
    return f"{host}:{port}"


def _in_thread(function: Callable[[], V]) -> asyncio.Future[V]:
    """The function's result, from a thread that holds up neither other work nor the end of the process.

    getaddrinfo cannot be canceled, and may take half a minute.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[V] = loop.create_future()

    def finish(result: V | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # the result of `function`
        else:
            future.set_exception(error)
            future.exception()  # asyncio logs an error that no one reads, and the caller may have gone

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="sidecar dns", daemon=True).start()
    return future
