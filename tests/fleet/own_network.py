"""Discovery by the system's resolver, in a network and with a resolv.conf that only this process has.

Run by `test_dns_discovery.py` inside `unshare --net --mount`. Prints what discovery said after each step, as JSON.
"""

from __future__ import annotations

import asyncio
import json

from sidecar.fleet import dns_discovery
from sidecar.fleet.dns_discovery import DnsDiscovery
from sidecar.policy.capacity import Capacity
from sidecar.policy.fields import ServiceName
from sidecar.policy.fleet import DnsService
from tests.support.dns_server import ZONE, DnsServer
from tests.support.own_network import bring_loopback_up, use_own_resolver
from tests.support.waiting import until


class CountingDiscovery(DnsDiscovery):
    """Counts its lookups."""

    looks = 0

    async def _look(self) -> float:
        pause_s = await super()._look()
        self.looks += 1
        return pause_s


async def main() -> None:
    """Changes the server's answers, and notes what discovery makes of each."""
    dns_discovery.LOOKUP_WITHIN_S = 3.0
    outcomes: dict[str, object] = {}
    with DnsServer(port=53) as server:
        service = DnsService(ServiceName("vllm." + ZONE.rstrip("."), 8000), 0.05)
        server.set("vllm", "A", "10.0.0.1", "10.0.0.2")
        discovery = CountingDiscovery(service, Capacity(tokens=1000, requests=8))
        await discovery.open()

        async def note(step: str) -> None:
            looks = discovery.looks
            await until(lambda: discovery.looks > looks + 1, 30)  # the first of them may have begun before
            names = [engine.name for engine in discovery.engines]
            outcomes[step] = [names, list(discovery.notices())]

        await note("two")
        server.records.clear()
        server.set("vllm", "AAAA", "fd00::2", "fd00::1")
        await note("ipv6")
        server.set("vllm", "A", "10.0.0.1")
        await note("dual stack")
        server.records.clear()
        await note("nxdomain")
        server.set("vllm", "A", "10.0.0.9")
        await until(lambda: len(discovery.engines) == 1)
        await note("back")
        await discovery.close()
    print(json.dumps(outcomes))  # noqa: T201  # for the test


if __name__ == "__main__":
    bring_loopback_up()
    use_own_resolver()
    asyncio.run(main())
