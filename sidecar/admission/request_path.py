"""Path of a request: what the app's router may read it as. The one place that decides whether a path is guarded.

A policy names paths as clients write them. The app may be mounted below a prefix (`root_path`) that the policy's path
has and the router's has not, or the other way round, and servers and frameworks differ in whether `path` begins with
it: it does from uvicorn and in Starlette since 0.33, it does not from hypercorn, granian and in older ones. Litestar's
mounts leave it in `raw_path` alone. So the router's path is read with none, some and all whole segments of the prefix
before it. What a policy closes is closed in each of these readings; what it opens, in the exact spelling alone.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from urllib.parse import urlparse

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.apis import MODELS_PATH
from sidecar.engines.base import MOST_SEGMENTS, plain_path, plain_paths
from sidecar.policy.endpoint import Endpoint

_MOST_AROUND = 32
"""Middlewares around an app that are looked into."""


def by_path(endpoints: Mapping[str, Endpoint]) -> Mapping[str, Endpoint]:
    """A policy's endpoints by their paths, as the policy spells them and as `plain_path` does: see `find_endpoint`."""
    return {**{plain_path(path): found for path, found in endpoints.items()}, **endpoints}


def guarded_endpoint(endpoints: Mapping[str, Endpoint], scope: Scope) -> Endpoint | None:
    """The endpoint (`by_path`) that guards a request; None where none does."""
    if scope["type"] != "http" or scope["method"].upper() != "POST":
        return None
    return find_endpoint(endpoints, scope)


def find_endpoint(endpoints: Mapping[str, Endpoint], scope: Scope) -> Endpoint | None:
    """The endpoint (`by_path`) that guards the path of a scope, in any reading; None where none does."""
    path, root = scope["path"], scope.get("root_path")
    exact = _first(endpoints, (route_path(scope), path, root + path)) if root else endpoints.get(path)
    return exact or _first(endpoints, readings(scope))


def _first(endpoints: Mapping[str, Endpoint], paths: Iterable[str]) -> Endpoint | None:
    return next((endpoints[path] for path in paths if path in endpoints), None)


def route_path(scope: Scope) -> str:
    """The path as the app's router reads it: without the prefix under which the app is mounted (Starlette's rule)."""
    path: str = scope["path"]
    root: str | None = scope.get("root_path")
    return path[len(root) :] if root and f"{path}/".startswith(f"{root}/") else path


def exact_paths(scope: Scope) -> tuple[str, str]:
    """The path as the app's router reads it and as the client wrote it, each decoded once: where no prefix is, twice
    the same.
    """
    return route_path(scope), scope["path"]


def readings(scope: Scope) -> tuple[str, ...]:
    """Every plain path that a path may stand for, the router's own first."""
    return tuple(dict.fromkeys(_joined(prefix, path) for prefix, path in _divided(scope)))


def is_model_list(path: str) -> bool:
    """True if the models are listed on this path, all or one."""
    return path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")


def asked_model(scope: Scope) -> str | None:
    """The model that a request asks about, empty for the list of all; None for another request."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return None
    path = next(filter(is_model_list, (*exact_paths(scope), *readings(scope))), None)
    return None if path is None else path.removeprefix(MODELS_PATH).removeprefix("/")


def path_for_app(scope: Scope, endpoint: Endpoint) -> str:
    """The path that the app is asked for: the endpoint's, or its `forward_to`, however the client has spelled it.

    Where the endpoint's path begins with segments that the router does not get, they are left out of it.
    """
    path: str = scope["path"]
    wanted = endpoint.forward_to or endpoint.path
    if path == wanted:
        return path
    root: str = scope.get("root_path") or ""
    if root and (path == root + wanted or root + path == wanted):
        return path
    plain = plain_path(endpoint.path)
    prefix = next((prefix for prefix, below in _divided(scope) if _joined(prefix, below) == plain), "")
    if prefix and _begins_with(plain_path(wanted), prefix):
        wanted = "/" + "/".join(wanted.split("/")[prefix.count("/") + 1 :])
    return root + wanted if _begins_with(path, root) else wanted


def _divided(scope: Scope) -> Iterator[tuple[str, str]]:
    """Every plain path that a router may read, with every prefix that may be meant before it. The likely ones first."""
    path: str = scope["path"]
    root: str = scope.get("root_path") or ""
    raw = (scope.get("raw_path") or b"").decode("latin-1") or path
    routed, prefixes = [route_path(scope)], [""]
    for whole in dict.fromkeys((path, raw)):  # BlackSheep reads the second
        found = (whole, _below_address(whole))
        routed += found
        if root:  # Django, Litestar and Quart do not ask whether it ends where a segment ends
            below = [one.partition(root)[2] for one in found if root in one]
            routed += [*below, *map(_below_address, below)]
    if root:
        prefixes += [*_tails(root), *_tails(plain_path(root))]
    if raw != path:
        whole, own = plain_path(raw), plain_path(path).removeprefix("/")
        if whole.endswith(own):
            prefixes += _tails(whole.removesuffix(own))
    for one in dict.fromkeys(plain for written in dict.fromkeys(routed) for plain in plain_paths(written)):
        is_named = one.count("/") <= MOST_SEGMENTS
        for prefix in dict.fromkeys(prefixes) if is_named else ("",):
            yield prefix, one


def _below_address(path: str) -> str:
    """The path of a whole address (RFC 9112, section 3.2.2), as Quart and BlackSheep take it; any other as it is."""
    if path.startswith("/"):
        return path
    try:
        return urlparse(path).path
    except ValueError:
        return path


def _tails(root: str) -> list[str]:
    """The last segments of a prefix, plain: one, two, and so on, to as many as a policy's path may have."""
    plain = map(plain_path, root.rstrip("/").split("/")[-MOST_SEGMENTS:])
    segments = [segment for segment in plain if segment != "/"]
    return ["".join(segments[at:]) for at in reversed(range(len(segments)))]


def _joined(prefix: str, path: str) -> str:
    return prefix if prefix and path == "/" else prefix + path


def _begins_with(path: str, prefix: str) -> bool:
    """True if a path begins with a prefix of whole segments."""
    return bool(prefix) and f"{path}/".startswith(f"{prefix}/")


def at_own_root(app: ASGIApp, serve: ASGIApp) -> ASGIApp:
    """App that serves the requests to `app`. FastAPI and Django may have a `root_path` of their own, which goes before
    the scope's, so that the router reads the path below it: around such an app, and around the middlewares that it is
    in, it is written before. Not that of others: Quart calls the folder of its code so.
    """
    root = _own_root(app)
    if not root:
        return serve

    def serve_at_root(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope["root_path"] = root
        return serve(scope, receive, send)

    return serve_at_root


def _own_root(app: ASGIApp) -> str:
    fastapi, django = sys.modules.get("fastapi"), sys.modules.get("django.core.handlers.asgi")
    inner: object = app
    for _ in range(_MOST_AROUND):
        if fastapi is not None and isinstance(inner, fastapi.FastAPI):
            return str(inner.root_path)
        if django is not None and isinstance(inner, django.ASGIHandler):
            return str(django.settings.FORCE_SCRIPT_NAME or "")
        inner = getattr(inner, "app", None)
    return ""
