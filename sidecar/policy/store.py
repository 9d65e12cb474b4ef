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
from collections.abc import Callable
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
_HIDDEN = "***"


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
        return f"{scheme}://{user}{','.join(map(_node_text, self.nodes))}{self._behind_the_hosts()}{self._query()}"

    def __repr__(self) -> str:
        return f"StoreAddress({str(self)!r})"

    def _behind_the_hosts(self) -> str:
        if self.path is not None:
            return quote(self.path)
        name = "" if self.master_name is None else f"/{self.master_name}"
        return name if self.kind is StoreKind.CLUSTER else f"{name}/{self.db}"

    def _query(self) -> str:
        parts = [f"db={self.db}"] if self.kind is StoreKind.SOCKET and self.db else []
        parts += [f"{name}={_option_text(name, value)}" for name, value in self.options]
        return "?" + "&".join(parts) if parts else ""


def _node_text(node: tuple[str, int]) -> str:
    host, port = node
    return f"[{quote(host, safe=':')}]:{port}" if ":" in host else f"{host}:{port}"


def _option_text(name: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _HIDDEN if name == "sentinel_password" else quote(value)


def store_address(text: str) -> StoreAddress:
    """Reads an address. Raises ValueError, and nothing else, with what is wrong and what would be right."""
    kind, tls, rest = _scheme(text)
    rest, asks, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    _one_at_sign(authority, path + query)
    userinfo, at, hosts = authority.rpartition("@")
    username, password = _credentials(userinfo) if at else (None, None)
    if asks and not query:
        raise ValueError("a ? with no option after it; remove it")
    options = read_options(query, _find_readers(kind, tls))
    master_name, db = _place(kind, path, options)
    return StoreAddress(
        kind=kind,
        nodes=_nodes(kind, hosts),
        path=file_path(f"/{path}", "the socket", "unix:///run/redis.sock") if kind is StoreKind.SOCKET else None,
        db=db,
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
    username, colon, password = userinfo.partition(":")
    if not colon or not password:
        raise ValueError("an @ without a password before it; write user:password@, or :password@ for a password alone")
    return decoded(username, "the user") or None, decoded(password, "the password")


def _find_readers(kind: StoreKind, tls: bool) -> Readers:
    """The options that have a meaning for such an address."""
    of_kind = {StoreKind.SENTINEL: SENTINEL, StoreKind.SOCKET: SOCKET}.get(kind, {})
    return {**(TLS if tls else {}), **of_kind}


def _place(kind: StoreKind, path: str, options: dict[str, OptionValue]) -> tuple[str | None, int]:
    """The master's name, None where there is none, and the database's number."""
    if kind is StoreKind.SOCKET:
        return None, database(str(options.pop("db", "0")))
    if kind is StoreKind.SENTINEL:
        name, _, path = path.partition("/")
        if not _MASTER_NAME.fullmatch(name):
            raise ValueError(
                "the master's name is missing, or is none that sentinels know (A-Z, a-z, 0-9 and . _ -); "
                "write it after the hosts, such as redis+sentinel://127.0.0.1:26379/mymaster/0"
            )
        return name, database(path or "0")
    db = database(path or "0")
    if kind is StoreKind.CLUSTER and db:
        raise ValueError("a cluster has no database but 0; remove what follows the hosts")
    return None, db


def _nodes(kind: StoreKind, hosts: str) -> tuple[tuple[str, int], ...]:
    if kind is StoreKind.SOCKET:
        if hosts:
            raise ValueError("a host where a socket's path belongs; write three slashes: unix:///run/redis.sock")
        return ()
    written = hosts.split(",")
    if kind is StoreKind.SERVER and len(written) > 1:
        raise ValueError("several hosts are not one server; write redis+sentinel:// or redis+cluster:// before them")
    several = len(written) > 1
    return tuple(
        _node(node, f"host {place}" if several else "the host", _PORTS[kind]) for place, node in enumerate(written, 1)
    )


def _node(text: str, what: str, port: int) -> tuple[str, int]:
    match = _NODE.fullmatch(text)
    if match is None:
        raise ValueError(f"{what} cannot be read; write it as host:{port}, an IPv6 address as [::1]:{port}")
    if match[3] and not 0 < int(match[3]) < 65536:
        raise ValueError(f"the port of {what} is not from 1 to 65535; write one such as {port}")
    host = match[2] or _ipv6(decoded(match[1], what), what, port)
    return host, int(match[3] or port)


def _ipv6(text: str, what: str, port: int) -> str:
    try:
        IPv6Address(text)
    except AddressValueError:
        raise ValueError(f"{what} is not an IPv6 address, as its brackets say; write it as [::1]:{port}") from None
    return text


OptionValue = str | bool
Readers = dict[str, Callable[[str, str], OptionValue]]

_PERCENT_ALONE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DATABASE = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def decoded(text: str, what: str) -> str:
    """The text without its percent codes. `what` is named where one is wrong; the text itself never is."""
    if _PERCENT_ALONE.search(text):
        raise ValueError(f"a % in {what} that begins no code such as %40; write the % itself as %25")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ValueError(f"the % codes in {what} are not UTF-8; write each byte of its UTF-8 as %XX") from None


def database(text: str) -> int:
    """A database's number."""
    if not _DATABASE.fullmatch(text):
        raise ValueError("the database is not a number; write one such as 0")
    return int(text)


def file_path(text: str, what: str, example: str) -> str:
    """A path that does not depend on where the process was started."""
    found = decoded(text, what)
    if not found.startswith("/") or found == "/" or not found.isprintable():
        raise ValueError(f"{what} is not the whole path of a file; write one such as {example}")
    return found


def _option_file(value: str, name: str) -> OptionValue:
    return file_path(value, name, "/etc/redis/ca.pem")


def _text_option(value: str, name: str) -> OptionValue:
    if not value:
        raise ValueError(f"{name} is empty; write it, or remove the option")
    return decoded(value, name)


def _one_of(*words: str) -> Callable[[str, str], OptionValue]:
    def read(value: str, name: str) -> OptionValue:
        if value not in words:
            raise ValueError(f"{name} is none of {', '.join(words)}; write one of them, such as {name}={words[-1]}")
        return value

    return read


def _option_flag(value: str, name: str) -> OptionValue:
    if value not in {"true", "false"}:
        raise ValueError(f"{name} is neither true nor false; write {name}=true")
    return value == "true"


TLS: Readers = {
    "ssl_ca_certs": _option_file,
    "ssl_certfile": _option_file,
    "ssl_keyfile": _option_file,
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "ssl_check_hostname": _option_flag,
}
SENTINEL: Readers = {"sentinel_username": _text_option, "sentinel_password": _text_option}
SOCKET: Readers = {"db": _text_option}
_ALL: Readers = {**TLS, **SENTINEL, **SOCKET}

_ELSEWHERE = (
    (TLS, "is only for an address with TLS; write rediss:// (or rediss+sentinel://, rediss+cluster://), or remove it"),
    (SENTINEL, "is only for sentinels; write redis+sentinel://, or remove it"),
    (SOCKET, "is only for unix://; write the database after the host, such as redis://127.0.0.1:6379/0"),
)


def read_options(query: str, known: Readers) -> dict[str, OptionValue]:
    """The options of a query, as far as this kind of address knows them. Raises ValueError with what is wrong."""
    options: dict[str, OptionValue] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError("an option without a value; write name=value, and a & inside a value as %26")
        if name not in known:
            raise ValueError(_not_here(name))
        if name in options:
            raise ValueError(f"{name} is written twice; keep one of them")
        options[name] = known[name](value, name)
    _fit_together(options)
    return options


def _not_here(name: str) -> str:
    for readers, belongs in _ELSEWHERE:
        if name in readers:
            return f"{name} {belongs}"
    return f"a query option that does not exist; {suggestion(name, list(_ALL), 'the options are')}"


def _fit_together(options: dict[str, OptionValue]) -> None:
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise ValueError("ssl_keyfile is a key without its certificate; write ssl_certfile too")
    if options.get("ssl_cert_reqs") == "none" and options.get("ssl_check_hostname"):
        raise ValueError(
            "ssl_check_hostname=true checks a certificate, and ssl_cert_reqs=none asks for none; remove one"
        )
    if "sentinel_username" in options and "sentinel_password" not in options:
        raise ValueError("sentinel_username is a user without a password; write sentinel_password too")
