"""Client of a running sidecar's admin port, for the commands that read its pages."""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from sidecar.cli.arguments import ADMIN
from sidecar.cli.output import CommandFailed
from sidecar.policy.secrets import HOW_TO_SET, token_header

PATIENCE_S = 3.0
_MOST_BYTES = 16 * 2**20
_TELLING_CODES = frozenset((
    "no_engines", "unknown_engine", "unknown_model", "bad_parameter", "drain_timeout", "resumed", "stopping",
    "admin_token_required", "no_stored_tenants", "unknown_tenant", "invalid_tenant", "body_too_large",
    "tenant_in_files", "store_unavailable", "tenant_exists", "key_in_use", "too_many_tenants", "no_usage",
    "unknown_request", "unknown_key", "no_worker",
))  # fmt: skip
"""Errors whose messages say all that there is to say."""

Document = TypeVar("Document")


class CannotSee(CommandFailed):
    """The admin port does not answer as one; the message is one line."""


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


def add_admin(parser: argparse.ArgumentParser, json_help: str) -> None:
    """Adds `--admin` and `--json`."""
    admin_help = "the sidecar's admin port (default %(default)s)"
    parser.add_argument("--admin", type=admin_url, default=ADMIN, metavar="URL", help=admin_help)
    parser.add_argument("--json", metavar="FILE", help=json_help)


def read_page(
    admin: str,
    path: str,
    document: type[Document],
    *,
    method: str = "GET",
    body: bytes | None = None,
    patience_s: float | None = PATIENCE_S,
    most_bytes: int = _MOST_BYTES,
) -> Document:
    """Asks the admin port for one of its JSON documents. Raises CannotSee, with the port's own sentence if it has one.

    `body` is JSON. `patience_s` None waits for the answer as long as the connection lasts.
    """
    # No proxy: it would be asked for an address of this machine, or of this network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(_request(admin, path, method, body), timeout=patience_s) as answer:
            body = answer.read(most_bytes)
        return msgspec.json.decode(body, type=document)
    except urllib.error.HTTPError as error:
        sentence = _sentence(error)
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise CannotSee(f"{admin} needs its admin token; {HOW_TO_SET}") from None
        if sentence is not None:
            raise CannotSee(sentence) from None
        raise CannotSee(
            f"{admin} answers, but has no {path} ({error.code}): is it the admin port? `sidecar serve` prints it"
        ) from None
    except msgspec.MsgspecError as error:
        raise CannotSee(f"{admin}{path} is not what this version of sidecar reads: {error}") from None
    except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", None) or error
        why = " ".join(str(getattr(reason, "strerror", None) or reason or type(error).__name__).lower().split())
        raise CannotSee(f"no answer from {admin}: {why}; `sidecar serve` prints its admin port as it starts") from None


def _sentence(error: urllib.error.HTTPError) -> str | None:
    """The admin port's own reason for a refusal; None where it gives none, or where another server answers."""
    try:
        found = msgspec.json.decode(error.read(_MOST_BYTES), type=_Refusal).error
    except (msgspec.MsgspecError, OSError, HTTPException):
        return None
    return found.message if found.code in _TELLING_CODES else None


def _request(admin: str, path: str, method: str, body: bytes | None) -> urllib.request.Request:
    """Raises CannotSee where the environment's token is none."""
    headers = {} if body is None else {"content-type": "application/json"}
    request = urllib.request.Request(f"{admin}{path}", data=body, headers=headers, method=method)
    try:
        for name, value in token_header(os.environ).items():
            request.add_unredirected_header(name, value)  # it is for this server alone
    except ValueError as mistake:
        raise CannotSee(str(mistake)) from None
    return request


def admin_url(text: str) -> str:
    """An argument's value: the address. Raises ArgumentTypeError for what is none."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of an admin port; write one like {ADMIN}")
    return text.rstrip("/")
