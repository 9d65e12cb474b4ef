"""What the policy says of a gateway that stands before the sidecar and names the tenant of a request in a header."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Network = IPv4Network | IPv6Network
_FORWARDED_FOR = b"x-forwarded-for"
_MOST_KEPT = 4096
"""Addresses whose answer is kept."""


@dataclass(frozen=True, slots=True)
class GatewayPolicy:
    """Whose requests name their own tenant, and the headers in which they do. `tier_header` is None for no tier."""

    tenant_header: bytes
    tier_header: bytes | None
    networks: tuple[Network, ...]
    _known: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)

    @property
    def headers(self) -> Sequence[bytes]:
        """The names of its headers: no one else's count, and none is passed on."""
        return (self.tenant_header,) if self.tier_header is None else (self.tenant_header, self.tier_header)

    def sent(self, client: tuple[str, int] | None, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request comes from the gateway. `client` is its address of the ASGI scope.

        A server may have taken the address of the connection out of `X-Forwarded-For` (uvicorn with `--proxy-headers`):
        whoever may write that header could name any address, so such an address is never the gateway's.
        """
        return client is not None and self.is_from(client) and not _is_written(client, headers)

    def is_from(self, client: tuple[str, int] | None) -> bool:
        """Whether a connection has an address of the gateway. Servers leave no port with one that a header named."""
        if client is None or not client[1]:
            return False
        found = self._known.get(client[0])
        if found is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            found = self._known[client[0]] = self._has(client[0])
        return found

    def _has(self, host: str) -> bool:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)

    def __str__(self) -> str:
        return f"{self.tenant_header.decode('ascii')} from {', '.join(map(str, self.networks))}"


def _is_written(client: tuple[str, int], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an address and its port are those of an `X-Forwarded-For`, as uvicorn 0.54 reads it."""
    written = b",".join(value for name, value in headers if name == _FORWARDED_FOR).decode("latin-1")
    hosts_and_ports = (part.strip().rpartition(":") for part in written.split(",")) if written else ()
    return any(host.strip("[]") == client[0] and _is_number(port, client[1]) for host, _, port in hosts_and_ports)


def _is_number(text: str, number: int) -> bool:
    try:
        return int(text) == number
    except ValueError:
        return False


def read_network(text: str) -> Network:
    """An address, or a network such as 10.0.0.0/8. Raises ValueError."""
    try:
        network = ip_network(text)
    except ValueError:
        try:
            wider = ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"'{text}' is no address and no network; write it like 10.0.0.0/8 or ::1") from None
        raise ValueError(f"'{text}' has bits beside its network; write {wider}") from None
    if network.prefixlen == 0:
        raise ValueError(f"'{text}' is every address, so every client could name any tenant; name the gateway's own")
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise ValueError(f"'{text}' is an IPv4 address in IPv6's form; write the IPv4 address")
    return network
