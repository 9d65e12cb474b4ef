"""vLLM: an int64, lower first; `X-Vllm-Priority` beats the body; unknown fields are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from sidecar.apis import Api
from sidecar.tools.emulator.dialects.base import (
    INT64_MAX,
    INT64_MIN,
    CachedPrompt,
    Dialect,
    EngineRefusal,
    header_integer,
    read_integer,
)
from sidecar.tools.emulator.request import Body, InvalidField
from sidecar.tools.step_model.queue import Rank

PRIORITY_HEADER = "x-vllm-priority"
_HEADER_APIS = frozenset({Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES})


class VllmDialect(Dialect):
    """The body is validated even where the header wins, and even where fcfs then ignores both."""

    owned_by = "vllm"
    overload = (HTTPStatus.SERVICE_UNAVAILABLE, "The request queue is full (--max-num-queued-reqs).")

    def rank(self, api: Api, body: Body, headers: Mapping[str, str]) -> Rank:
        value = None
        if "priority" in body and api is not Api.MESSAGES:
            value = read_integer("priority", body["priority"], INT64_MIN, INT64_MAX)
        header = header_integer(headers, PRIORITY_HEADER) if api in _HEADER_APIS else None
        return Rank(value if header is None else header)

    def invalid(self, api: Api, mistake: InvalidField) -> EngineRefusal:
        location = ("body",) if mistake.field == "body" else ("body", mistake.field)
        error = {"type": mistake.kind, "loc": location, "msg": mistake.message, "input": mistake.value}
        return self._error(api, HTTPStatus.BAD_REQUEST, f"1 validation error:\n  {error}", "Bad Request", mistake.field)

    def refuse(self, api: Api, status: int, message: str) -> EngineRefusal:
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else HTTPStatus(status).phrase.replace(" ", "")
        return self._error(api, status, message, kind, None)

    def queue_length(self, api: Api, waiting: int, running: int) -> int | None:
        del api
        return waiting + running

    def prompt_tokens_details(self, api: Api, prompts: Sequence[CachedPrompt]) -> dict[str, int] | None:
        """Only with --enable-prompt-tokens-details. Seen running in 0.32: of several prompts it reports the last one.

        Chat and messages add what went into the cache (`_make_prompt_tokens_details`, `_build_anthropic_usage`).
        """
        if not self.config.cache_report or not prompts:
            return None
        found, created = prompts[-1]
        if api is Api.COMPLETIONS:
            return {"cached_tokens": found}
        return {"cached_tokens": found, "created_cache_tokens": created}

    def stopping(self, api: Api) -> EngineRefusal | None:
        """Seen running in 0.32: the client of the engine is shut down first, whatever --shutdown-timeout says."""
        return self.refuse(api, HTTPStatus.INTERNAL_SERVER_ERROR, "cannot schedule new futures after shutdown")

    def stopped(self, api: Api) -> EngineRefusal:
        """Seen running in 0.32."""
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        return self.refuse(api, HTTPStatus.INTERNAL_SERVER_ERROR, message)

    def _error(self, api: Api, status: int, message: str, kind: str, param: str | None) -> EngineRefusal:
        if api is Api.MESSAGES:
            return EngineRefusal(status, anthropic_error(status, message))
        return EngineRefusal(status, {"error": {"message": message, "type": kind, "param": param, "code": int(status)}})


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """An error in the Messages API's shape."""
    kinds = {400: "invalid_request_error", 503: "overloaded_error"}
    return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}}
