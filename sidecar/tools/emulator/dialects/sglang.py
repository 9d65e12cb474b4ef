"""SGLang: an int64, higher first, untagged last of all; overload inside a stream is an error object under a 200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from sidecar.apis import Api
from sidecar.tools.emulator.config import Scheduling
from sidecar.tools.emulator.dialects.base import (
    INT64_MAX,
    INT64_MIN,
    CachedPrompt,
    Dialect,
    EngineRefusal,
    header_integer,
    read_integer,
)
from sidecar.tools.emulator.request import Body
from sidecar.tools.step_model.queue import Order, Rank, sglang_inverted_order

PRIORITY_HEADER = "x-override-priority"
_BODY_APIS = frozenset({Api.CHAT, Api.COMPLETIONS, Api.EMBEDDINGS})
_HEADER_APIS = frozenset({Api.CHAT, Api.MESSAGES})


class SglangDialect(Dialect):
    """Preemption of running requests is not emulated; everything that waits is ordered as it would be."""

    owned_by = "sglang"
    overload = (HTTPStatus.SERVICE_UNAVAILABLE, "The request queue is full.")
    kick_starts_streams = True
    refuses_inside_streams = True
    displaces = True

    @property
    def queue_order(self) -> Order:
        """See `Dialect.queue_order`; a switch turns it round."""
        is_inverted = self.config.low_values_first and self.config.scheduling is Scheduling.PRIORITY
        return sglang_inverted_order if is_inverted else super().queue_order

    def rank(self, api: Api, body: Body, headers: Mapping[str, str]) -> Rank:
        value = body.get("priority") if api in _BODY_APIS else None
        priority = None if value is None else read_integer("priority", value, INT64_MIN, INT64_MAX)
        if self.config.header_overrides and api in _HEADER_APIS and PRIORITY_HEADER in headers:
            priority = header_integer(headers, PRIORITY_HEADER)
            if priority is None or not INT64_MIN <= priority <= INT64_MAX:
                raise self.refuse(api, HTTPStatus.BAD_REQUEST, f"invalid {PRIORITY_HEADER} header")
        return Rank(self.config.default_priority if priority is None else priority)

    def refuse(self, api: Api, status: int, message: str) -> EngineRefusal:
        del api
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else str(int(status))
        body = {"object": "error", "message": message, "type": kind, "param": None, "code": int(status)}
        return EngineRefusal(status, body)

    def displaced(self, api: Api) -> EngineRefusal:
        return self.refuse(api, HTTPStatus.SERVICE_UNAVAILABLE, "The request is aborted by a higher priority request.")

    def prompt_tokens_details(self, api: Api, prompts: Sequence[CachedPrompt]) -> dict[str, int] | None:
        """Only with --enable-cache-report, and only where something was found (`UsageProcessor._details_if_cached`)."""
        found = self.responses_cached_tokens(prompts)
        return {"cached_tokens": found} if found and api is not Api.MESSAGES else None

    def responses_cached_tokens(self, prompts: Sequence[CachedPrompt]) -> int:
        return super().responses_cached_tokens(prompts) if self.config.cache_report else 0
