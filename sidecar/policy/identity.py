"""The policy's keys for identities that are not API keys: signed tokens (JWTs) of an issuer."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ValidationInfo, field_validator, model_validator

from sidecar.extras import how_to_install
from sidecar.policy import fields as of
from sidecar.policy import units
from sidecar.policy.declared import context, declared, key
from sidecar.policy.problems import printable, quoted, unknown

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""Signature algorithms with a private and a public key. `none` and HS256 are not among them: anyone who
can read the issuer's public keys could sign such a token."""
MOST_KEY_SET_BYTES = 1 << 20
LONGEST_SKEW_S = 300
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def check_installed() -> None:
    """Raises ValueError where the package that checks signatures is missing."""
    if importlib.util.find_spec("joserfc") is None:
        raise ValueError(
            f"tokens are checked with the package joserfc, which is not installed; {how_to_install('jwt')}"
        )


def is_address(key_set: str) -> bool:
    """True if a key set is fetched, and not read from a file."""
    return key_set.startswith(("https://", "http://"))


def check_address(url: str) -> None:
    """Raises ValueError for an address that an issuer's keys must not be fetched from."""
    if "@" in url:  # never repeated: what is before it may be a password
        raise ValueError("has a user or a password; leave it out: an issuer's public keys need none")
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError("has a space or a character beyond ASCII; write it like https://id.example/keys")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"is no address: {error}; write it like https://id.example/keys") from None
    if not host or port == 0:
        raise ValueError("has no host; write it like https://id.example/keys")
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise ValueError(
            "is not encrypted, so that another host could give keys of its own; write https://, or fetch the keys "
            "into a file and name that"
        )


def public_keys(raw: bytes) -> list[Mapping[str, object]]:
    """The entries of a JSON Web Key Set (RFC 7517) that may be a public key. Raises ValueError where it is none."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON; name a JSON Web Key Set") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError('has no list "keys"; name a JSON Web Key Set')
    found: list[Mapping[str, object]] = [
        one for one in entries if isinstance(one, dict) and one.get("kty") in ("RSA", "EC", "OKP")
    ]
    if not found:
        raise ValueError("has no public key (kty RSA, EC or OKP); name the issuer's JSON Web Key Set")
    return found


def read_key_set(file: Path) -> bytes:
    """The content of a key set's file. Raises OSError, or ValueError where it is too large."""
    with file.open("rb") as opened:
        raw = opened.read(MOST_KEY_SET_BYTES + 1)
    if len(raw) > MOST_KEY_SET_BYTES:
        raise ValueError(f"is larger than {MOST_KEY_SET_BYTES} bytes")
    return raw


def _shown(value: object) -> str:
    return units.text(value, "a text", "https://id.example")


def _key_set(value: object, info: ValidationInfo) -> str:
    written = units.text(value, "an address or a file", "https://id.example/keys")
    if is_address(written):
        check_address(written)
        return written
    if "://" in written:
        raise ValueError(f"{quoted(written)} is neither https:// nor a file; write it like https://id.example/keys")
    file = context(info).folder / written
    try:
        public_keys(read_key_set(file))
    except OSError:
        raise ValueError(
            f"the file {quoted(written)} cannot be read; write where it is, relative to this file"
        ) from None
    except ValueError as error:
        raise ValueError(f"{quoted(written)} {error}") from None
    return str(file.absolute())


def _skew(value: object) -> float:
    skew_s = units.duration_s(value)
    if skew_s > LONGEST_SKEW_S:
        raise ValueError('more than any clock is wrong; write "5m" or less')
    return float(skew_s)


def _algorithm(value: object) -> str:
    name = units.text(value, "an algorithm", "RS256")
    if name.lower() == "none" or name.upper().startswith("HS"):
        raise ValueError(
            f"{quoted(name)} is not allowed: whoever knows the issuer's public keys could sign such a token; write one "
            "with a private key, such as RS256 or ES256"
        )
    if name not in ALGORITHMS:
        raise ValueError(unknown("algorithm", name, list(ALGORITHMS)))
    return name


_Text = Annotated[str, of.Reads(_shown)]
_KEY_SET = of.schema("An address (https://), or a file, relative to this one.")
_DURATION = of.schema('A duration: "500ms", "30s".', pattern=r"^[0-9.]+ ?(us|ms|s|m|h)$")
_Algorithms = Annotated[
    tuple[Annotated[str, of.Reads(_algorithm, {"type": "string", "enum": list(ALGORITHMS)})], ...],
    of.listed("[RS256, ES256]"),
    AfterValidator(of.distinct),
]


@dataclass(frozen=True, slots=True)
@declared
class JwtPolicy:
    """Bearer tokens of one issuer, signed by it (JWTs), beside the API keys."""

    issuer: _Text = key(..., "The tokens' `iss`, exactly.", "https://id.example")
    audience: _Text = key(..., "The tokens' `aud`, or one of it: the name of this service.", "llm")
    key_set: Annotated[str, of.Reads(_key_set, _KEY_SET)] = key(
        ..., "Where the issuer's public keys are (JSON Web Key Set).", "https://id.example/keys", name="jwks"
    )
    tenant_claim: _Text = key(..., "The claim that names a tenant of this policy.", "tenant")
    tier_claim: _Text | None = key(
        None,
        "The claim that names the tier of requests which name none, up to the tenant's `max_tier`.",
        "tier",
    )
    clock_skew_s: Annotated[float, of.Reads(_skew, _DURATION)] = key(
        "30s",  # clocks that are set by NTP differ by less; more would let an expired token live on
        "How far the issuer's clock and this one may differ.",
        "10s",
    )
    algorithms: _Algorithms = key(list(ALGORITHMS), "The signature algorithms that are accepted.", ["RS256"])

    @field_validator("issuer")
    @classmethod
    def _can_be_checked(cls, issuer: str) -> str:
        check_installed()
        return issuer

    def __str__(self) -> str:
        return f"tokens of {self.issuer}"


# -- The policy's keys for a gateway that stands before the sidecar and names the tenant of a request in a header.

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
