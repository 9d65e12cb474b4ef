"""vLLM: a 64-bit integer, LOWER is more important. It acts only with `--scheduling-policy priority`.

The header (from 0.28 on) beats the body, needs no rewriting and covers messages; embeddings read the body only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidecar.engines.dialect import (
    Forward,
    Priority,
    Stated,
    default_carrier,
    header,
    member,
    stated_in_body,
    stated_in_header,
)
from sidecar.engines.routes import CANCEL, COUNTING, OPENAI, Routes
from sidecar.payload.decode import Payload
from sidecar.policy.model import Api, Carrier

HEADER = b"x-vllm-priority"
STEP = 10
"""Between tiers. At least 2, because the engine serves a tool's follow-up turn at its priority minus 1."""


ROUTES = Routes(
    generating={
        **OPENAI,
        "/v1/chat/completions/batch": None,
        "/invocations": Api.CHAT,
        "/inference/v1/generate": None,
        "/generate": None,
        "/pooling": None,
        "/classify": None,
        "/v1/classify": None,
        "/score": None,
        "/v1/score": None,
        "/generative_scoring": None,
        "/rerank": None,
        "/v1/rerank": None,
        "/v2/rerank": None,
        "/v2/embed": None,
        "/v2/chat": None,
        "/v1/decisions": None,
        "/v1/audio/transcriptions": None,
        "/v1/audio/translations": None,
        "/v1/audio/speech": None,
        "/v1/images/generations": None,
        "/v1/images/edits": None,
        "/v1/videos": None,
    },
    harmless=COUNTING | {CANCEL, "/v1/chat/completions/render", "/v1/completions/render", "/ping"},
)
"""Read from vLLM 0.33 (`entrypoints/`), and vLLM-Omni for images, videos and speech. `/invocations` takes chat, text
completions, embeddings and more: as chat it is guarded for chat alone."""


class Vllm:
    """Level times ten: the most important tier is 0, the engine's own default."""

    more_important_is_higher: ClassVar[bool] = False
    abort_latency_s: ClassVar[float] = 0.25
    """The server hears of the closed connection at once (`with_cancellation`, `StreamingResponse`); the engine ends the
    step that it computes. About 0.1 s was seen; twice that, and a margin for the way there."""
    aborts_in_its_call: ClassVar[bool] = True
    """The call is canceled, and `AsyncLLM.generate` aborts the request before it passes the cancellation on."""

    def __init__(self, carrier: Carrier | None = None) -> None:
        self._by_header = default_carrier(carrier, Carrier.HEADER) is Carrier.HEADER

    def priority(self, level: int, levels: int) -> Priority:  # noqa: ARG002  # the ladder's length does not matter here
        """See `Dialect.priority`."""
        return level * STEP

    def forward(self, api: Api, priority: Priority) -> Forward:
        """See `Dialect.forward`."""
        by_header = self._by_header or api is Api.MESSAGES
        return header(HEADER, priority) if by_header and api is not Api.EMBEDDINGS else member(priority)

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:
        """See `Dialect.asked`."""
        return stated_in_header(HEADER, headers) or stated_in_body(payload)
