"""`engine: none`: admission orders the requests, and the engine, which is not known, gets no priority."""

from __future__ import annotations

from sidecar.engines.base import CANCEL, COHERE, COUNTING, MEDIA, OPENAI, SCORING, Engine, Routes, unsized


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
