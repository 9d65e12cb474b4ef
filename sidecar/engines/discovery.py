"""Discovery of the engine behind a server, from its pages or from the routes of an app.

`/v1/models` is read first, and `/metrics` last, because trtllm-serve's must not be read: reading takes its figures away
from every other collector. A proxy in between may write its own name into the models; then other pages are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sidecar.engines.base import OPENAPI, Engine
from sidecar.engines.pages import Metrics, Pages, find_json, find_text, mapping, mappings
from sidecar.engines.registry import ENGINES

_MODELS = "/v1/models"
_SERVER_INFO = "/server_info"
_METRICS = "/metrics"


@dataclass(frozen=True, slots=True)
class Identity:
    """The server that answers: `engine` is None where no page says it, `where` the page, `model` the first one served.

    `models` are all that it lists, with adapters and other names. `context_tokens` is the longest request that the
    model takes, prompt and output together.
    """

    engine: type[Engine] | None
    where: str
    model: str | None
    context_tokens: int | None = None
    models: tuple[str, ...] = ()


async def identify(pages: Pages, *, reads_metrics: bool = True) -> Identity:
    """Reads which engine a server is. Raises Unread where it does not answer.

    `reads_metrics` False leaves out the one page that must not be read of trtllm-serve.
    """
    identity = await identify_by_models(pages)
    if identity.engine is None:
        engine, where = await _by_pages(pages, reads_metrics=reads_metrics)
        identity = replace(identity, engine=engine, where=where)
    return identity


async def identify_by_models(pages: Pages) -> Identity:
    """Identity by `/v1/models` alone."""
    cards = mappings((await find_json(pages, _MODELS)).get("data"))
    card = next(iter(cards), {})
    model, context = card.get("id"), card.get("max_model_len")
    return Identity(
        engine_by_owner(card.get("owned_by")),
        _MODELS,
        model if isinstance(model, str) else None,
        context if isinstance(context, int) and context > 0 else None,
        tuple(name for each in cards if isinstance(name := each.get("id"), str)),
    )


def identify_by_routes(app: object) -> Identity | None:
    """The engine whose own server an app in this process is; None where it is none's."""
    if not is_engine_server(app):
        return None
    packages = set(_packages(app, set()))
    found = next(engine for engine in ENGINES.values() if packages & set(engine.fingerprint.packages))
    return Identity(found, "its routes", None)


def engine_by_owner(owner: object) -> type[Engine] | None:
    """The engine that writes this `owned_by` into its model cards; None for any other."""
    named = str(owner).lower()
    return next((engine for engine in ENGINES.values() if engine.fingerprint.owner == named), None)


async def _by_pages(pages: Pages, *, reads_metrics: bool) -> tuple[type[Engine] | None, str]:
    title = str(mapping((await find_json(pages, OPENAPI)).get("info")).get("title")).lower()
    for engine in ENGINES.values():
        if engine.fingerprint.title is not None and engine.fingerprint.title in title:
            return engine, OPENAPI
    info = await find_json(pages, _SERVER_INFO)
    for engine in ENGINES.values():
        if engine.fingerprint.server_info in info:
            return engine, _SERVER_INFO
    # Engines' own pages come before the one that must not be read of every engine.
    for path in sorted({engine.metrics_page for engine in ENGINES.values()}, key=lambda path: path == _METRICS):
        if path == _METRICS and not reads_metrics:
            continue
        metrics = Metrics(await find_text(pages, path))
        for engine in ENGINES.values():
            if engine.fingerprint.metrics is not None and metrics.has_prefix(engine.fingerprint.metrics):
                return engine, path
    return None, "no page"


def serves_models(app: object) -> bool:
    """True if an app in this process has a route for `/v1/models`, or one for every path: else it need not be asked."""
    return any(
        path == _MODELS or (path.startswith("/{") and path.endswith(":path}")) for path, _ in _routes(app, set())
    )


def is_engine_server(app: object) -> bool:
    """True if most of an app's routes are handled by functions of an engine's package.

    `vllm serve --middleware` constructs the middleware with the next app alone: only the routes show where it is
    mounted. An app with routes of its own that includes an engine's router among them is an app.
    """
    known = {package for engine in ENGINES.values() for package in engine.fingerprint.packages}
    packages = list(_packages(app, set()))
    return 2 * sum(package in known for package in packages) > len(packages)


def _packages(app: object, seen: set[int]) -> Iterator[str]:
    """The top package of every route's handler."""
    for _, endpoint in _routes(app, seen):
        yield str(getattr(endpoint, "__module__", "")).partition(".")[0]


def _routes(app: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Every route's path, as its router has it, and its handler, also below mounts and included routers."""
    if id(app) in seen:
        return
    seen.add(id(app))
    # FastAPI (0.165) keeps an included router as one route, which holds the router.
    routes = getattr(app, "routes", None) or getattr(getattr(app, "original_router", None), "routes", None)
    for route in routes or ():
        endpoint = getattr(route, "endpoint", None)
        if endpoint is None:
            yield from _routes(route, seen)
        else:
            yield str(getattr(route, "path", "")), endpoint
