"""Registry of engines: those of this package, and those that installed packages add.

A package adds an engine by an entry point of the group `admission_sidecar.engines` that names its class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from sidecar.engines.base import CANCEL, COHERE, COUNTING, MEDIA, OPENAI, SCORING, Engine, Routes, unsized
from sidecar.engines.dynamo import Dynamo
from sidecar.engines.sglang import Sglang
from sidecar.engines.tensorrt_llm import TensorRtLlm
from sidecar.engines.vllm import Vllm
from sidecar.payload.decode import Payload
from sidecar.payload.edit import remove

# -- `engine: none`: admission orders the requests, and the engine, which is not known, gets no priority.


class NoPriorityEngine(Engine):
    """No engine priority. The app still finds the level in the request's scope."""

    name = "none"
    title = "none"
    more_important_is_higher = False
    aborts_in_its_call = True
    """An app that is mounted is its own engine: only the end of its call says when it has ended its work."""
    gauges_stand_still = True

    routes = Routes(
        generating={
            **OPENAI,
            **SCORING,
            **MEDIA,
            **COHERE,
            **unsized("/v1/chat/completions/batch", "/v1/messages/batches", "/v1/audio/translations"),
        },
        harmless=COUNTING | {CANCEL},
    )
    """Of an engine that is not known: the paths that have one meaning everywhere. `/generate` may be an app's own."""


GROUP = "admission_sidecar.engines"
BUILT_IN: tuple[type[Engine], ...] = (TensorRtLlm, Vllm, Sglang, Dynamo, NoPriorityEngine)

_log = logging.getLogger("sidecar.engine")


def added(points: Iterable[EntryPoint]) -> list[type[Engine]]:
    """The engines of entry points. One with a mistake is left out with a warning: the others go on."""
    engines = []
    for point in points:
        try:
            engines.append(_load(point))
        except Exception as mistake:  # noqa: PERF203  # each engine has its own
            message, fields = "the engine %s cannot be used: %s: %s", {"event": "engine_unusable"}
            _log.warning(message, point.value, type(mistake).__name__, mistake, extra=fields)
    return engines


def _load(point: EntryPoint) -> type[Engine]:
    engine = point.load()
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise TypeError(f"{engine!r} is not a subclass of sidecar.engines.Engine")
    if not isinstance(engine.routes, Routes) or not engine.title:
        raise TypeError("its `routes` or its `title` is missing")
    if engine.name in {one.name for one in BUILT_IN}:
        raise ValueError(f"the name {engine.name} is taken")
    if not all(header.startswith(b"x-") and header == header.lower() for header in _list_untrusted(engine)):
        raise ValueError("a header of it does not begin with x-, in lower case")
    if any(path[:1] != ("nvext",) for path in engine.untrusted_members):
        raise ValueError("of a request's body only `priority` and `nvext` are decoded")
    return engine


def _list_untrusted(engine: type[Engine]) -> tuple[bytes, ...]:
    return engine.untrusted_headers if engine.header is None else (engine.header, *engine.untrusted_headers)


ENGINES: Mapping[str, type[Engine]] = MappingProxyType(
    {engine.name: engine for engine in (*BUILT_IN, *added(entry_points(group=GROUP)))}
)
"""All engines by the name that a policy gives them."""

_HEADERS = {header for engine in ENGINES.values() for header in _list_untrusted(engine)}
CLIENT_HEADER_PREFIXES = tuple(sorted(header for header in _HEADERS if header.endswith(b"-")))
CLIENT_HEADERS = frozenset(_HEADERS.difference(CLIENT_HEADER_PREFIXES))
"""Headers that some engine takes a priority or a trusted tenant from. None of them passes from a client."""

CLIENT_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("priority",),
    *dict.fromkeys(path for engine in ENGINES.values() for path in engine.untrusted_members),
)
"""Body members that some engine takes a priority from. None of them passes from a client."""


@lru_cache(maxsize=64)  # a client sends the same names with every request; anyone chooses them, and a head is bounded
def client_headers(names: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The headers of a request, of lower-case names, that some engine would take a priority or a tenant from."""
    return tuple([name for name in names if name in CLIENT_HEADERS or name.startswith(CLIENT_HEADER_PREFIXES)])


def client_members(payload: Payload) -> list[str]:
    """The body members of a request that some engine would take a priority from, as a client writes them."""
    found = [] if payload.priority in (None, b"null") else ["priority"]
    if payload.nvext is not None:
        text = payload.nvext
        found += [".".join(path) for path in CLIENT_MEMBERS if path[0] == "nvext" and remove(text, path[1:]) != text]
    return found
