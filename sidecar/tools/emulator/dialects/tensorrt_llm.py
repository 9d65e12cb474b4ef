"""TensorRT-LLM: `priority` in [0, 1] on chat and completions, higher first; unknown fields are refused there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from sidecar.apis import Api
from sidecar.tools.emulator.dialects.base import Dialect, EngineRefusal, pydantic_errors
from sidecar.tools.emulator.request import Body, InvalidField, check_bounds
from sidecar.tools.step_model.queue import Rank

# The fields of openai_protocol.py at 0076e939; both models forbid every other one.
_SHARED_FIELDS = frozenset(
    {
        "add_special_tokens",
        "best_of",
        "conversation_params",
        "detokenize",
        "disaggregated_params",
        "early_stopping",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "lora_request",
        "max_tokens",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "presence_penalty",
        "priority",
        "prompt_ignore_length",
        "repetition_penalty",
        "response_format",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "top_p_min",
        "truncate_prompt_tokens",
        "use_beam_search",
        "user",
    }
)
_CHAT_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "agent_hierarchy",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "injected_chat_template_kwargs",
        "max_completion_tokens",
        "media_io_kwargs",
        "messages",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "prompt_token_ids",
        "prompt_token_ids_b64",
        "reasoning_effort",
        "thinking",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
KNOWN_FIELDS = {
    Api.CHAT: (_SHARED_FIELDS | _CHAT_FIELDS) - {"detokenize"},
    Api.COMPLETIONS: _SHARED_FIELDS | {"prompt", "return_context_logits", "suffix"},
}
"""Endpoints that are missing here (responses, messages) accept any field and drop the priority."""


class TrtllmDialect(Dialect):
    """Almost every error is a 400; there is no limit on its queue but for embeddings."""

    owned_by = "tensorrt_llm"
    overload = (HTTPStatus.TOO_MANY_REQUESTS, "The request queue is full.")

    def check(self, api: Api, body: Body) -> None:
        known = KNOWN_FIELDS.get(api)
        if known is None:
            return
        for field in body:
            if field not in known or (field == "priority" and not self.config.priority_field):
                mistake = InvalidField(field, "extra_forbidden", "Extra inputs are not permitted", body[field])
                raise self.invalid(api, mistake)

    def rank(self, api: Api, body: Body, headers: Mapping[str, str]) -> Rank:
        del headers  # none is read
        value = body.get("priority")
        if api not in KNOWN_FIELDS or value is None:
            return Rank()
        return Rank(_read_priority(value))

    def invalid(self, api: Api, mistake: InvalidField) -> EngineRefusal:
        del api
        # Its own RequestValidationError handler: 400 and not FastAPI's 422, and `error` is a bare string.
        return EngineRefusal(HTTPStatus.BAD_REQUEST, {"error": pydantic_errors(mistake)})

    def refuse(self, api: Api, status: int, message: str) -> EngineRefusal:
        del api
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else HTTPStatus(status).phrase
        return EngineRefusal(
            status, {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        )

    def queue_length(self, api: Api, waiting: int, running: int) -> int | None:
        del running
        return waiting if api is Api.EMBEDDINGS else None


def _read_priority(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise InvalidField("priority", "float_parsing", "Input should be a valid number", value)
    check_bounds("priority", value, number, 0, 1)
    return number
