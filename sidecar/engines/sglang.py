"""SGLang: a 64-bit integer, higher is more important. It acts only with `--enable-priority-scheduling`.

Its header is off unless `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1`, and then covers chat and messages alone; responses
accept the member and drop it (up to 0.5.23, `serving_responses.py` builds its request without it).
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
    spread,
    stated_in_body,
    stated_in_header,
)
from sidecar.engines.routes import CANCEL, COUNTING, OPENAI, Routes
from sidecar.payload.decode import Payload
from sidecar.policy.model import Api, Carrier

HEADER = b"x-override-priority"
STEP, WIDEST = 2, 10
"""The whole ladder spans at most the engine's preemption threshold (10): a wider one would evict running requests. Few
values, because each becomes a metric label that the engine never drops."""

_WITH_MEMBER = frozenset((Api.CHAT, Api.COMPLETIONS, Api.EMBEDDINGS))
_WITH_HEADER = frozenset((Api.CHAT, Api.MESSAGES))


ROUTES = Routes(
    generating={
        **OPENAI,
        "/generate": None,
        "/generate_from_file": None,
        "/inference/v1/generate": None,
        "/encode": None,
        "/classify": None,
        "/v1/classify": None,
        "/v1/score": None,
        "/v1/rerank": None,
        "/api/chat": None,
        "/api/generate": None,
        "/invocations": Api.CHAT,
        "/vertex_generate": None,
        "/v1/audio/transcriptions": None,
        "/v1/audio/speech": None,
        "/v1/images/generations": None,
        "/v1/images/edits": None,
        "/v1/videos": None,
    },
    harmless=COUNTING
    | {CANCEL, "/v1/tokenize", "/v1/detokenize", "/parse_function_call", "/separate_reasoning", "/api/show"},
    changing_reads=frozenset(
        (
            *("/flush_cache", "/clear_hicache_storage_backend", "/freeze_gc", "/slow_down", "/configure_logging"),
            *("/start_profile", "/stop_profile", "/set_trace_level", "/get_weights_by_name"),
            *("/release_memory_occupation", "/resume_memory_occupation", "/open_session", "/close_session"),
            *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
            "/dump_expert_distribution_record",
        )
    ),
)
"""Read from SGLang's `srt/entrypoints/http_server.py`. `/generate`, `/encode`, `/classify` and `/v1/rerank` answer to
PUT as well; Vertex' path has another name where AIP_PREDICT_ROUTE says so."""


class Sglang:
    """0 for the last tier, 2 more for each above it."""

    more_important_is_higher: ClassVar[bool] = True
    abort_latency_s: ClassVar[float] = 4.5
    """The server asks for a disconnect every SGLANG_REQUEST_STATE_WAIT_TIMEOUT seconds, 4 as shipped
    (`tokenizer_manager.py`: `_wait_one_response`); a stream's abort task waits for 2 s (`create_abort_task`). Then the
    engine ends the step that it computes."""
    aborts_in_its_call: ClassVar[bool] = False
    """A stream's abort task is a background task, which some servers do not run after a disconnect."""

    def __init__(self, carrier: Carrier | None = None) -> None:
        self._by_header = default_carrier(carrier, Carrier.BODY) is Carrier.HEADER

    def priority(self, level: int, levels: int) -> Priority:
        """See `Dialect.priority`."""
        return spread(level, levels, STEP, WIDEST)

    def forward(self, api: Api, priority: Priority) -> Forward:
        """See `Dialect.forward`."""
        if self._by_header and api in _WITH_HEADER:
            return header(HEADER, priority)
        return member(priority) if api in _WITH_MEMBER else Forward()

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:
        """See `Dialect.asked`."""
        return stated_in_header(HEADER, headers) or stated_in_body(payload)
