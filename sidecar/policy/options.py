"""The query options of a store's address: `?ssl_ca_certs=/etc/redis/ca.pem`.

Only what an operator must be able to say is read. Timeouts and pool sizes are the store's own business, and an option
that a client library would silently ignore is a mistake. A refusal repeats neither a value nor an unknown name: a
password with an unquoted `&` would end up as the name of an option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from sidecar.policy.problems import suggestion

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


def _option_text(value: str, name: str) -> OptionValue:
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
SENTINEL: Readers = {"sentinel_username": _option_text, "sentinel_password": _option_text}
SOCKET: Readers = {"db": _option_text}
_ALL: Readers = {**TLS, **SENTINEL, **SOCKET}

_ELSEWHERE = (
    (TLS, "is only for an address with TLS; write rediss:// (or rediss+sentinel://, rediss+cluster://), or remove it"),
    (SENTINEL, "is only for sentinels; write redis+sentinel://, or remove it"),
    (SOCKET, "is only for unix://; write the database behind the host, such as redis://127.0.0.1:6379/0"),
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
