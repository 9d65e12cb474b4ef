"""No spelling of a path leads past admission: what a real router reads as a guarded path, as one that generates without
a lease, or as an operator's page.
"""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as some
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from sidecar import AdmissionMiddleware
from sidecar.context import SCOPE_KEY
from tests.support.middleware import CHAT, KEYS, SMALL, Caller, policy

pytestmark = pytest.mark.anyio

_PIECES = [
    "/",
    "//",
    ".",
    "..",
    "/./",
    "/../",
    "%2f",
    "%2e",
    "%0a",
    "%0A",
    "%00",
    "%20",
    "%2520",
    ";a=b",
    "\\",
    "%5c",
    "v",
]
_PATHS = [
    *("/v1/chat/completions", "/V1/Chat/Completions", "/v1/%63hat/completions"),
    *("/metrics", "/%6detrics", "/docs", "/v1/score", "/V1/Score", "/v1/%73core"),
]
_ROOTS = ["", "/below", "/v", "/v1", "/m"]


@some.composite
def spelled(draw: some.DrawFn) -> str:
    """A path with pieces inserted, or letters encoded, anywhere."""
    path = draw(some.sampled_from(_ROOTS)) + draw(some.sampled_from(_PATHS))
    for _ in range(draw(some.integers(0, 3))):
        at = draw(some.integers(0, len(path)))
        path = path[:at] + draw(some.sampled_from(_PIECES)) + path[at:]
    return path if path.startswith("/") else f"/{path}"


async def _chat(request: Request) -> Response:
    return PlainTextResponse("admitted" if SCOPE_KEY in request.scope else "past admission")


async def _page(_: Request) -> Response:
    return PlainTextResponse("a page")


async def _score(request: Request) -> Response:
    return PlainTextResponse("generated")


def _engine() -> Starlette:
    """An engine's server; its `/metrics` is mounted as vLLM's, and so is everything that begins like it."""
    metrics = Mount("/metrics", Starlette(routes=[Route("/{rest:path}", _page, methods=["GET", "POST"])]))
    generating = [Route(CHAT, _chat, methods=["POST", "GET"]), Route("/v1/score", _score, methods=["POST"])]
    return Starlette(routes=[*generating, metrics, Route("/docs", _page)])


@pytest.mark.parametrize("unguarded", ["deny", "generating", "allow"])
@given(path=spelled(), root=some.sampled_from(_ROOTS))
@example(path="/v1/chat/completions%0A", root="")
@example(path="/v1/chat/completions", root="/v")
@example(path="/below/v1/chat/completions", root="/below")
@example(path="/metrics%0a", root="")
@example(path="/v/%6detrics/../", root="/v")
@example(path="/below//v1/./%73core", root="/below")
async def test_no_spelling_leads_past_admission(unguarded: str, path: str, root: str) -> None:
    sidecar = AdmissionMiddleware(_engine(), policy=_POLICIES[unguarded])
    for method in ("POST", "GET"):
        caller = Caller(
            sidecar,
            SMALL,
            path=unquote(path),
            raw_path=path.encode(),
            root_path=root,
            method=method,
            headers=[(b"x-api-key", KEYS["acme"].encode()), (b"content-length", b"%d" % len(SMALL))],
        )
        await caller.run()
        body = b"".join(message.get("body", b"") for message in caller.sent[1:])
        assert (method, unguarded) == ("GET", "allow") or body != b"past admission"
        assert unguarded != "deny" or body != b"a page"
        assert unguarded == "allow" or body != b"generated"


_POLICIES = {
    chosen: policy(f"unguarded: {chosen}\npublic: []\n", engine="vllm") for chosen in ("deny", "generating", "allow")
}
