"""Answers of the admin port, and the files and headers of its HTML pages."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

FRESH = {"cache-control": "no-store"}
"""Headers of an answer that no cache keeps."""
_YES, _NO = frozenset(("true", "1", "yes", "")), frozenset(("false", "0", "no"))

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Finds what answers a request: a response, or the app of one of several pools."""


class Liveness(msgspec.Struct, frozen=True):
    """The answer of `GET /healthz`."""

    status: Literal["alive"] = "alive"


class Readiness(msgspec.Struct, frozen=True):
    """The answer of `GET /readyz`. `reasons` say why it is not ready, `notices` what is out of order all the same."""

    status: Literal["ready", "not ready"]
    reasons: list[str]
    notices: list[str]


class ErrorDetails(msgspec.Struct, frozen=True):
    """A stable `code`, and a sentence."""

    code: str
    message: str


class Error(msgspec.Struct, frozen=True):
    """An error as every page of the port answers it."""

    error: ErrorDetails


class RefusedByPage(Exception):
    """Answered as `response`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.response = refused(status, code, message)


def refused(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as every page of the port answers it."""
    answer = msgspec.json.encode(Error(ErrorDetails(code, message)))
    return Response(answer, status, {**FRESH, **(headers or {})}, "application/json")


def flag(request: Request, name: str) -> bool:
    """A switch in the query; False where it is not there. Raises RefusedByPage."""
    written = request.query_params.get(name, "false").lower()
    if written in _YES:
        return True
    if written in _NO:
        return False
    raise RefusedByPage(400, "bad_parameter", f"{name}: {written!r} is neither true nor false")


def json_answer(document: msgspec.Struct, status: int = 200) -> Response:
    """A document as JSON, which no cache keeps."""
    return Response(msgspec.json.encode(document), status, FRESH, "application/json")


# -- Files of the admin port's HTML pages, and the headers that those pages are sent with.


def read_text(name: str) -> str:
    """A file beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def headers(style: str, script: str | None = None) -> Mapping[str, str]:
    """Headers of a page with this style and this script, which may load and run nothing else.

    A page without a script connects to nothing.
    """
    scripts = "" if script is None else f"script-src {_hash(script)}; connect-src 'self'; "
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; {scripts}img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
