"""Recognition of an engine's own server by the routes of the app in which the middleware is mounted."""

from __future__ import annotations

from collections.abc import Iterator

ENGINE_PACKAGES = frozenset(("vllm", "vllm_omni", "sglang", "tensorrt_llm"))


def is_engine_server(app: object) -> bool:
    """Whether most of an app's routes are handled by functions of an engine's package.

    `vllm serve --middleware` constructs the middleware with the next app alone: nothing else tells where it stands.
    An app with routes of its own that includes an engine's router among them is an app.
    """
    packages = list(_packages(app, set()))
    return 2 * sum(package in ENGINE_PACKAGES for package in packages) > len(packages)


def _packages(app: object, seen: set[int]) -> Iterator[str]:
    """The top package of every route's handler, also below mounts and included routers."""
    if id(app) in seen:
        return
    seen.add(id(app))
    # FastAPI (0.165) keeps an included router as one route, which holds the router.
    routes = getattr(app, "routes", None) or getattr(getattr(app, "original_router", None), "routes", None)
    for route in routes or ():
        endpoint = getattr(route, "endpoint", None)
        if endpoint is None:
            yield from _packages(route, seen)
        else:
            yield str(getattr(endpoint, "__module__", "")).partition(".")[0]
