"""Routes of an engine's server: which of its paths compute on the model, and which are harmless.

Each engine's file declares its own `ROUTES`. A path that is in neither list is unknown: an engine adds routes with
every release, and some of them change the engine itself (weights, adapters, caches, sleep). Such a path is neither
generating nor harmless.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from sidecar.policy.model import Api

_PLACEHOLDER = "{id}"
_SEGMENT = r"[A-Za-z0-9_-]{1,256}"
"""An identifier in a path: no dot, slash or percent sign, so that no server reads another path out of it."""
_DECODINGS = 4
"""A path that is encoded more often than this is no path that an engine routes."""
_UNMISTAKABLE = ("/v1/", "/v2/", "/inference/")
"""Beginnings of paths that no app uses for anything else. They are found below a mount's prefix, too."""

OPENAI: Mapping[str, Api | None] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/v1/embeddings": Api.EMBEDDINGS,
}
"""Paths that every engine generates on, with the shape of their requests."""
REALTIME = "/v1/realtime"
"""A WebSocket over which a model generates."""
COUNTING = frozenset(("/tokenize", "/detokenize", "/v1/messages/count_tokens"))
"""Paths that count tokens, and run no model."""
CANCEL = "/v1/responses/{id}/cancel"
"""Ends a background response. Its id is random: a client can only cancel a response whose id it was told."""


@dataclass(frozen=True, slots=True)
class Routes:
    """What one engine's server does on its paths.

    `generating` maps each path that runs the model to the shape of its requests, None for a shape that admission
    cannot size. `harmless` are paths that may be called with other methods than GET and neither run the model nor
    change the engine; `{id}` in one stands for one segment. `changing_reads` change the engine even by GET.
    `websockets` generate over a WebSocket.
    """

    generating: Mapping[str, Api | None]
    harmless: frozenset[str]
    changing_reads: frozenset[str] = frozenset()
    websockets: frozenset[str] = frozenset((REALTIME,))
    _patterns: tuple[tuple[str, re.Pattern[str]], ...] = field(init=False, repr=False, compare=False)
    _endings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = [(path, _pattern(path)) for path in sorted(self.harmless) if _PLACEHOLDER in path]
        object.__setattr__(self, "_patterns", tuple(patterns))
        found = {*self.generating, *self.websockets}
        object.__setattr__(self, "_endings", tuple(path for path in sorted(found) if path.startswith(_UNMISTAKABLE)))

    def harmless_route(self, path: str) -> str | None:
        """The entry of `harmless` that a path is, exactly as written; None where it is none of them."""
        if path in self.harmless:
            return path if _PLACEHOLDER not in path else None
        return next((route for route, pattern in self._patterns if pattern.fullmatch(path)), None)

    def generating_route(self, path: str) -> str | None:
        """The generating path or WebSocket that some server may read `path` as; None where there is none.

        More spellings are found than any engine routes: other letter case, encoded characters, doubled slashes,
        dots, parameters, a mount's prefix. It is safe to find too much here, and not too little.
        """
        plain = plain_path(path)
        if plain in self.generating or plain in self.websockets:
            return plain
        return next((route for route in self._endings if plain.endswith(route)), None)


def plain_path(path: str) -> str:
    """A path without what hides it: decoded, in lower case, without parameters, doubled slashes and dots."""
    for _ in range(_DECODINGS):
        decoded = unquote(path)
        if decoded == path:
            break
        path = decoded
    path = "".join(character for character in path if character.isprintable()).replace("\\", "/").lower()
    segments = [segment.partition(";")[0].strip() for segment in path.partition("?")[0].split("/")]
    return posixpath.normpath("/" + "/".join(segments).lstrip("/"))


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(_SEGMENT.join(map(re.escape, path.split(_PLACEHOLDER))), re.ASCII)
