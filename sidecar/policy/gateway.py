"""The policy's keys for a gateway that stands before the sidecar and names the tenant of a request in a header."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated

from pydantic import AfterValidator, model_validator

from sidecar.policy import fields as of
from sidecar.policy import units
from sidecar.policy.declared import declared, key
from sidecar.policy.problems import printable

Network = IPv4Network | IPv6Network
_FORWARDED_FOR = b"x-forwarded-for"


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


def _network(value: object) -> Network:
    return read_network(printable(units.text(value, "an address or a network", "10.0.0.0/8")))


_Networks = Annotated[
    tuple[Annotated[Network, of.Reads(_network)], ...], of.listed("[10.0.0.0/8]"), AfterValidator(of.distinct)
]


@dataclass(frozen=True, slots=True)
@declared
class GatewayPolicy:
    """A gateway before the sidecar that has found out who asks, and names the tenant in a header."""

    tenant_header: of.HeaderName = key(..., "The header that names a tenant of this policy.", "x-tenant")
    networks: _Networks = key(
        ...,
        "The addresses and networks of the gateway's own connections. From others the headers do not count.",
        ["10.0.0.0/8"],
        name="addresses",
    )
    tier_header: of.HeaderName | None = key(
        None,
        "The header that names the tier of requests which name none, up to the tenant's `max_tier`.",
        "x-tenant-tier",
    )

    @model_validator(mode="after")
    def _are_two(self) -> GatewayPolicy:
        if self.tier_header == self.tenant_header:
            raise ValueError("tier_header is also the tenant_header; write another name")
        return self

    @property
    def headers(self) -> Sequence[bytes]:
        """The names of its headers: no one else's count, and none is passed on."""
        return (self.tenant_header,) if self.tier_header is None else (self.tenant_header, self.tier_header)

    def sent(self, client: tuple[str, int] | None, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True if a request comes from the gateway. `client` is its address of the ASGI scope.

        A server may have taken the address of the connection out of `X-Forwarded-For` (uvicorn with `--proxy-headers`):
        a client that may write that header could name any address, so such an address is never the gateway's.
        """
        return client is not None and self.is_from(client) and not _is_written(client, headers)

    def is_from(self, client: tuple[str, int] | None) -> bool:
        """True if a connection has an address of the gateway. Servers leave no port with one that a header named."""
        return client is not None and bool(client[1]) and _within(self.networks, client[0])

    def __str__(self) -> str:
        return f"{self.tenant_header.decode('ascii')} from {', '.join(map(str, self.networks))}"


@lru_cache(maxsize=4096)
def _within(networks: tuple[Network, ...], host: str) -> bool:
    """True if an address is in one of the networks."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


def _is_written(client: tuple[str, int], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if an address and its port are those of an `X-Forwarded-For`, as uvicorn 0.54 reads it."""
    written = b",".join(value for name, value in headers if name == _FORWARDED_FOR).decode("latin-1")
    hosts_and_ports = (part.strip().rpartition(":") for part in written.split(",")) if written else ()
    return any(host.strip("[]") == client[0] and _is_number(port, client[1]) for host, _, port in hosts_and_ports)


def _is_number(text: str, number: int) -> bool:
    try:
        return int(text) == number
    except ValueError:
        return False
