"""From tensorrt_llm/serve/openai_protocol.py and anthropic_protocol.py: the requests' fields, and what they refuse.

Every field is here by name, as in a stored copy of openai_protocol.py that names no commit, and at 7b6d11c0
(anthropic_protocol.py).
Those that the stand-in reads or refuses have their type, the others take any value. OpenAIBaseModel forbids unknown
members; ResponsesRequest and the Anthropic models allow them. `max_completion_tokens` has `max_tokens` as its
validation alias and may be written by either name: with both, one of them is an unknown member.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from tensorrt_llm.build import HAS_FIELD

CHAT_FIELDS = """
messages prompt_token_ids prompt_token_ids_b64 model frequency_penalty logit_bias logprobs top_logprobs
max_completion_tokens n presence_penalty response_format seed stop stream stream_options temperature top_p tools
tool_choice user reasoning_effort thinking thinking_token_budget prompt_ignore_length best_of use_beam_search top_k
top_p_min min_p repetition_penalty length_penalty early_stopping stop_token_ids include_stop_str_in_output
ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens lora_request echo
add_generation_prompt add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
disaggregated_params conversation_params cache_salt priority agent_hierarchy mm_processor_kwargs
"""
COMPLETION_FIELDS = """
model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
stream_options suffix temperature top_p user lora_request prompt_ignore_length use_beam_search top_k top_p_min min_p
repetition_penalty length_penalty early_stopping stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens return_context_logits detokenize
thinking_token_budget add_special_tokens response_format disaggregated_params priority conversation_params
"""
RESPONSES_FIELDS = """
background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls
previous_response_id prompt reasoning thinking_token_budget service_tier store stream temperature text tool_choice
tools top_logprobs top_p truncation user request_id
"""
MESSAGES_FIELDS = """
model messages max_tokens system tools tool_choice temperature top_p top_k stop_sequences stream metadata thinking
output_config betas context_management
"""


class OpenAIBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class StreamOptions(OpenAIBaseModel):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = True


class _Generating(OpenAIBaseModel):
    @model_validator(mode="before")
    @classmethod
    def validate_stream_options(cls, data):
        if data.get("stream_options") and not data.get("stream"):
            raise ValueError("Stream options can only be defined when stream is true.")
        return data

    @model_validator(mode="before")
    @classmethod
    def check_suffix(cls, data):
        if data.get("suffix"):
            raise ValueError("suffix is not supported")
        return data


class _Responses(OpenAIBaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def validate_background(cls, data):
        if data.get("background") and not data.get("store", True):
            raise ValueError("background can only be used when `store` is true")
        return data

    @model_validator(mode="before")
    @classmethod
    def validate_prompt(cls, data):
        if data.get("prompt") is not None:
            raise ValueError("prompt template is not supported")
        return data


class _Anthropic(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)


def _schema(name: str, fields: str, base: type[BaseModel], **typed: Any) -> type[BaseModel]:
    names = [field for field in fields.split() if HAS_FIELD or field != "priority"]
    given = {field: kind for field, kind in typed.items() if field in names}
    return create_model(name, __base__=base, **dict.fromkeys(names, (Any, None)) | given)


_PRIORITY = (float | None, Field(default=None, ge=0.0, le=1.0))
_OPENAI = {
    "model": (str, ...),
    "stream": (bool | None, False),
    "stream_options": (StreamOptions | None, None),
    "n": (int, 1),
    "priority": _PRIORITY,
}

CompletionRequest = _schema(
    "CompletionRequest",
    COMPLETION_FIELDS,
    _Generating,
    prompt=(list[int] | list[list[int]] | str | list[str], ...),
    max_tokens=(int | None, None),
    **_OPENAI,
)
ChatCompletionRequest = _schema(
    "ChatCompletionRequest",
    CHAT_FIELDS,
    _Generating,
    messages=(list[dict[str, Any]], ...),
    max_completion_tokens=(int | None, Field(default=None, validation_alias="max_tokens")),
    **_OPENAI,
)
ResponsesRequest = _schema(
    "ResponsesRequest",
    RESPONSES_FIELDS,
    _Responses,
    model=(str, ...),
    input=(str | list[Any], ...),
    background=(bool | None, False),
    store=(bool | None, True),
    max_output_tokens=(int | None, None),
    stream=(bool | None, False),
)
AnthropicMessagesRequest = _schema(
    "AnthropicMessagesRequest",
    MESSAGES_FIELDS,
    _Anthropic,
    model=(str, ...),
    messages=(list[dict[str, Any]], Field(min_length=1)),
    max_tokens=(int, Field(ge=1)),
    stream=(bool | None, False),
)


class AnthropicCountTokensRequest(_Anthropic):
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)


class AnthropicBatchRequestItem(_Anthropic):
    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: AnthropicMessagesRequest


class AnthropicCreateBatchRequest(_Anthropic):
    requests: list[AnthropicBatchRequestItem] = Field(min_length=1, max_length=100_000)
