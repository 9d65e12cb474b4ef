"""Where many replicas keep one pool: the address of a Redis server, of its socket, of sentinels or of a cluster.

    redis://[[user]:password@]host[:6379][/db]          rediss:// with TLS
    unix://[[user]:password@]/path/to.sock[?db=N]
    redis+sentinel://[[user]:password@]host[:26379],.../master-name[/db]     rediss+sentinel:// with TLS
    redis+cluster://[[user]:password@]host[:6379],...                        rediss+cluster:// with TLS

An address may hold a password. No text of an address, and no refusal of one, ever shows it: a refusal quotes nothing of
what may be one, so that it holds for the addresses, too, in which the password cannot be separated from the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import quote, unquote_to_bytes

from sidecar.policy.problems import quoted, suggestion, unknown

STORE_VARIABLE = "SIDECAR_STORE"
"""The environment variable that goes before the policy's own `store`."""
EXAMPLE = "redis://127.0.0.1:6379/0"


class StoreKind(str, Enum):
    """How the server is reached: at its host, at its socket, as sentinels say, or as a cluster's nodes say."""

    SERVER = "server"
    SOCKET = "socket"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


SCHEMES: dict[str, tuple[StoreKind, bool]] = {
    "redis": (StoreKind.SERVER, False),
    "rediss": (StoreKind.SERVER, True),
    "unix": (StoreKind.SOCKET, False),
    "redis+sentinel": (StoreKind.SENTINEL, False),
    "rediss+sentinel": (StoreKind.SENTINEL, True),
    "redis+cluster": (StoreKind.CLUSTER, False),
    "rediss+cluster": (StoreKind.CLUSTER, True),
}
"""How an address may begin: the kind of store, and whether with TLS."""

_PORTS = {StoreKind.SERVER: 6379, StoreKind.SENTINEL: 26379, StoreKind.CLUSTER: 6379}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*", re.ASCII)
_NODE = re.compile(r"(?:\[([^\[\]]+)\]|([A-Za-z0-9._-]{1,253}))(?::([0-9]{1,5}))?", re.ASCII)
_MASTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)  # what Redis Sentinel itself allows
_PERCENT_ALONE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DATABASE = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_HIDDEN = "***"
_SOCKET_EXAMPLE = "unix:///run/redis.sock"


@dataclass(frozen=True, slots=True, repr=False)
class StoreAddress:
    """A store's address, read. As text, it is the address with `***` for every password.

    `nodes` are hosts and ports: one for SERVER, the sentinels for SENTINEL, the first nodes to ask for CLUSTER, none
    for SOCKET. `path` is the socket's, `master_name` what the sentinels call the server; both None elsewhere.
    `username` and `password` are the server's own, decoded, None where there is none; a username never comes without a
    password. `options` are those that were written, the sentinels' user and password among them, as Redis clients take
    them: `ssl_check_hostname` a bool, all others text.
    """

    kind: StoreKind
    nodes: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    master_name: str | None = None
    options: tuple[tuple[str, str | bool], ...] = ()

    def __str__(self) -> str:
        scheme = next(name for name, what in SCHEMES.items() if what == (self.kind, self.tls))
        user = "" if self.password is None else f"{quote(self.username or '', safe='')}:{_HIDDEN}@"
        hosts = (f"[{quote(host, safe=':')}]" if ":" in host else host for host, _ in self.nodes)
        place = ",".join(f"{host}:{port}" for host, (_, port) in zip(hosts, self.nodes, strict=True))
        place += quote(self.path or "") + (f"/{self.master_name}" if self.master_name else "")
        options = dict(self.options)
        if self.kind in {StoreKind.SERVER, StoreKind.SENTINEL}:
            place += f"/{self.db}"
        elif self.db:
            options["db"] = str(self.db)
        options |= {"sentinel_password": _HIDDEN} if "sentinel_password" in options else {}
        query = "&".join(f"{name}={quote(_as_written(value), safe='/*')}" for name, value in options.items())
        return f"{scheme}://{user}{place}{'?' if query else ''}{query}"

    def __repr__(self) -> str:
        return f"StoreAddress({str(self)!r})"


def _as_written(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def store_address(text: str) -> StoreAddress:
    """Reads an address. Raises ValueError, and nothing else, with what is wrong and what would be right."""
    kind, tls, rest = _scheme(text)
    rest, asks, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    _one_at_sign(authority, path + query)
    userinfo, at, hosts = authority.rpartition("@")
    username, password = _credentials(userinfo) if at else (None, None)
    options = _options(query.split("&") if asks else (), kind, tls)
    socket = master_name = None
    if kind is StoreKind.SOCKET:
        socket, path = _file_path(f"/{path}" if not hosts else "", "the socket", _SOCKET_EXAMPLE), ""
    elif kind is StoreKind.SENTINEL:
        master_name, _, path = path.partition("/")
        if not _MASTER_NAME.fullmatch(master_name):
            raise ValueError(
                "the master's name is missing, or is none that sentinels know (A-Z, a-z, 0-9 and . _ -); "
                "write it after the hosts, such as redis+sentinel://127.0.0.1:26379/mymaster/0"
            )
    written = str(options.pop("db", path or "0"))
    if not _DATABASE.fullmatch(written) or (kind is StoreKind.CLUSTER and written != "0"):
        raise ValueError("the database is not a number, or not 0 in a cluster, which has no other; write one such as 0")
    return StoreAddress(
        kind=kind,
        nodes=() if kind is StoreKind.SOCKET else _nodes(kind, hosts.split(",")),
        path=socket,
        db=int(written),
        username=username,
        password=password,
        tls=tls,
        master_name=master_name,
        options=tuple(options.items()),
    )


def _scheme(text: str) -> tuple[StoreKind, bool, str]:
    """The kind of store, whether with TLS, and what follows `://`."""
    if not text.isprintable() or " " in text or "#" in text:
        raise ValueError(
            "a space, a # or a character that cannot be printed does not belong in a store's address; "
            "write it as %20, %23 or the like"
        )
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        shown = "this" if "@" in text or "%40" in text else quoted(text.partition("?")[0])
        raise ValueError(f"{shown} is not a store's address; write {EXAMPLE}")
    if scheme.lower() not in SCHEMES:
        raise ValueError(unknown("scheme", scheme, list(SCHEMES)))
    return *SCHEMES[scheme.lower()], rest


def _one_at_sign(authority: str, behind: str) -> None:
    """Refuses an @ that may be a part of a password, because the end of the password would not be known."""
    if authority.count("@") > 1 or "@" in behind:
        raise ValueError(
            "an @ that is not the one before the host or the path; name user and password once, there, "
            "write every other @ as %40, and / ? inside a password as %2F %3F"
        )


def _credentials(userinfo: str) -> tuple[str | None, str]:
    username, _, password = userinfo.partition(":")
    if not password:
        raise ValueError("an @ without a password before it; write user:password@, or :password@ for a password alone")
    return _decoded(username, "the user") or None, _decoded(password, "the password")


def _nodes(kind: StoreKind, written: Sequence[str]) -> tuple[tuple[str, int], ...]:
    several = len(written) > 1
    if kind is StoreKind.SERVER and several:
        raise ValueError("several hosts are not one server; write redis+sentinel:// or redis+cluster:// before them")
    return tuple(
        _node(node, f"host {place}" if several else "the host", _PORTS[kind]) for place, node in enumerate(written, 1)
    )


def _node(text: str, what: str, default: int) -> tuple[str, int]:
    match = _NODE.fullmatch(text)
    port = int(match[3] or default) if match else 0
    if match and 0 < port < 65536:
        if match[2]:
            return match[2], port
        with suppress(AddressValueError):
            host = _decoded(match[1], what)
            IPv6Address(host)
            return host, port
    raise ValueError(f"{what} cannot be read; write it as host:{default}, an IPv6 address as [::1]:{default}")


def _decoded(text: str, what: str) -> str:
    """The text without its percent codes. `what` is named where one is wrong; the text itself never is."""
    if not _PERCENT_ALONE.search(text):
        with suppress(UnicodeDecodeError):
            return unquote_to_bytes(text).decode()
    raise ValueError(f"a % in {what} that begins no code of UTF-8; write the % itself as %25, and an @ as %40")


def _file_path(text: str, what: str, example: str = "/etc/redis/ca.pem") -> str:
    """A path that does not depend on where the process was started."""
    found = _decoded(text, what)
    if not found.startswith("/") or found == "/" or not found.isprintable():
        raise ValueError(f"{what} is not the whole path of a file; write one such as {example}")
    return found


OptionValue = str | bool
Reader = Callable[[str, str], OptionValue]


def _one_of(*words: str) -> Reader:
    def read(value: str, name: str) -> OptionValue:
        if value not in words:
            raise ValueError(f"{name} is none of {', '.join(words)}; write one of them, such as {name}={words[-1]}")
        return value

    return read


def _flag(value: str, name: str) -> OptionValue:
    return _one_of("false", "true")(value, name) == "true"


OPTIONS: dict[str, Reader] = {
    "ssl_ca_certs": _file_path,
    "ssl_certfile": _file_path,
    "ssl_keyfile": _file_path,
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "ssl_check_hostname": _flag,
    "sentinel_username": _decoded,
    "sentinel_password": _decoded,
    "db": _decoded,
}
"""The options of a query. Those of TLS begin with `ssl_`, those of sentinels with `sentinel_`; a socket has `db`."""
_NEEDS = {"ssl_keyfile": "ssl_certfile", "sentinel_username": "sentinel_password"}


def _options(query: Sequence[str], kind: StoreKind, tls: bool) -> dict[str, OptionValue]:
    """The options of a query, as far as this kind of address has them. Raises ValueError with what is wrong."""
    has = {"ssl": tls, "sentinel": kind is StoreKind.SENTINEL, "db": kind is StoreKind.SOCKET}
    known = [name for name in OPTIONS if has[name.partition("_")[0]]]
    options: dict[str, OptionValue] = {}
    for part in query:
        name, _, value = part.partition("=")
        if not value:
            raise ValueError("an option without a value; write name=value, and a & inside a value as %26")
        if name not in known:
            here = suggestion(name, known, "its options are") if known else "it has none; remove it"
            raise ValueError(f"a query option that such an address does not have; {here}")
        if name in options:
            raise ValueError(f"{name} is written twice; keep one of them")
        options[name] = OPTIONS[name](value, name)
    for name, other in _NEEDS.items():
        if name in options and other not in options:
            raise ValueError(f"{name} does nothing without {other}; write that, too")
    if options.get("ssl_cert_reqs") == "none" and options.get("ssl_check_hostname"):
        raise ValueError(
            "ssl_check_hostname=true checks a certificate, and ssl_cert_reqs=none asks for none; remove one"
        )
    return options
