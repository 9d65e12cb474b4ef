"""The fields of a request's body that are no prompt, those that carry a prompt in a place of their own, and the rest.

The engines accept about a hundred fields beside OpenAI's and Anthropic's own, and more with every release. The rule is
safe against the next one: a field that is not listed here as harmless counts as prompt, by its bytes.

Read from vLLM 0.33, SGLang 0.5.23, TensorRT-LLM f996de06 and Dynamo 1.6.1. One table serves all engines: what one of
them ignores is sent by no one but by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

COMMON: tuple[str, ...] = (
    *("temperature", "top_p", "stop", "stream_options", "user", "seed", "frequency_penalty", "presence_penalty"),
    *("tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "metadata", "reasoning_effort", "store"),
    *("reasoning", "stop_sequences", "top_k", "min_p", "repetition_penalty", "skip_special_tokens", "ignore_eos"),
    *("min_tokens", "encoding_format"),
)
"""Harmless fields that many clients send. A body with these alone is read in one pass."""

HARMLESS: frozenset[str] = frozenset(
    (
        *COMMON,
        # How tokens are chosen.
        *("top_p_min", "typical_p", "length_penalty", "early_stopping", "use_beam_search", "logit_bias", "bad_words"),
        *("allowed_token_ids", "watermarking", "repetition_detection", "prompt_ignore_length", "custom_params"),
        *("custom_logit_processor", "thinking_token_budget", "thinking"),
        # Where the answer ends: these can only make it shorter than its maximum.
        *("stop_token_ids", "stop_regex", "no_stop_trim", "include_stop_str_in_output", "max_tool_calls"),
        *("truncation", "truncate_prompt_tokens", "truncation_side"),
        # What the answer says, and how it is sent.
        *("prompt_logprobs", "logprob_token_ids", "echo", "detokenize", "spaces_between_special_tokens"),
        *("stream_interval", "stream_reasoning", "separate_reasoning", "include_reasoning", "include", "modalities"),
        *("audio", "verbosity", "dimensions", "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text"),
        *("return_token_offsets", "return_prompt_token_ids", "return_hidden_states", "return_routed_experts"),
        *("return_cached_tokens_details", "return_meta_info", "return_context_logits", "enable_response_messages"),
        "background",
        # A grammar bounds what is generated; the model does not read it.
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "regex", "ebnf"),
        # How the model's own template is filled in.
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        # Names for people, caches and routers.
        *("client_metadata", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("request_id", "rid", "session_id", "cache_salt", "extra_key", "custom_labels", "conversation_params"),
        *("agent_hierarchy", "lora_path", "lora_request", "ngram_corpus_id", "data_parallel_rank", "routed_dp_rank"),
        *("disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
)
"""Fields that never reach the prompt, whatever they hold."""

UNSIZED = frozenset(
    (
        # Names for what another server keeps: its size is known there only.
        *("previous_response_id", "conversation", "prompt", "session_params"),
        # A program that writes the prompt, with loops.
        "chat_template",
        # Tensors. A saved one may say with a stride of zero that a few bytes are a million rows.
        "prompt_embeds",
    )
)
"""Fields whose prompt cannot be sized from the body. `prompt` is one where it is not the API's own prompt: a template's
name (`/v1/responses`)."""

_TRANSFER_NAMES = frozenset(
    (
        *("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host"),
        *("remote_port", "remote_request_id", "tp_size", "transfer_id"),
    )
)
_DYNAMO_NAMES = frozenset(
    (
        *("agent_hints", "greed_sampling", "use_raw_prompt", "annotations", "backend_instance_id", "extra_fields"),
        *("max_thinking_tokens", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"),
        "request_timestamp_ms",
    )
)
_TOKEN_IDS = frozenset(("input_ids", "prompt_token_ids", "token_data"))
_SHORTEST_TOKEN = 4
"""Bytes that an item of a list counts for at least. `[1,1,1]` has two bytes an item, and may be a token each."""
_NUMBERS = b"0123456789+-.eE, \t\r\n"
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]"))

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Carried(msgspec.Struct):
    """What the fields beside an API's own carry to the prompt.

    `tokens` are exact, in `prompts` prompts. `texts` are fields whose JSON is tokenized with the prompt. `unread_bytes`
    is the size of fields that are not known, and `unsized` the name of one whose prompt cannot be sized.
    """

    tokens: int = 0
    prompts: int = 0
    texts: list[bytes] = []
    unread_bytes: int = 0
    unsized: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing beside the API's own fields."""
        return self is NOTHING or self == NOTHING


NOTHING = Carried()


def carried(others: Mapping[str, bytes]) -> Carried:
    """Weighs the fields that are neither an API's own nor harmless, by their names. The values are JSON."""
    found = Carried()
    for name, value in others.items():
        if value != b"null":
            _CARRIERS.get(name, _unread)(found, name, value)
    return found


def _unread(found: Carried, name: str, value: bytes) -> None:
    items = value.count(b",") + 1
    found.unread_bytes += max(len(name) + len(value), items * _SHORTEST_TOKEN)


def _unsized(found: Carried, name: str, value: bytes) -> None:  # noqa: ARG001  # whatever it holds
    found.unsized = name


def _text(found: Carried, name: str, value: bytes) -> None:  # noqa: ARG001  # whatever it is called
    found.texts.append(value)


def _token_ids(found: Carried, name: str, value: bytes) -> None:
    """A list of token ids, or one for each prompt."""
    brackets = _brackets(value)
    if not brackets:
        _unread(found, name, value)
        return
    found.tokens += value.count(b",") + 1
    found.prompts = max(found.prompts, brackets.count(b"[]"))


def _embeddings(found: Carried, name: str, value: bytes) -> None:
    """A list of rows of numbers, a row for each token, or a list of such lists, one for each prompt."""
    brackets = _brackets(value)
    if brackets[:2] != b"[[":
        _unread(found, name, value)
        return
    found.tokens += brackets.count(b"[]")
    found.prompts = max(found.prompts, brackets[1:].count(b"[["), 1)


def _brackets(value: bytes) -> bytes:
    """The brackets of a list of numbers, however deep; empty for anything else."""
    is_numbers = value[:1] == b"[" and not value.translate(None, _NUMBERS + b"[]")
    return value.translate(None, _ALL_BUT_BRACKETS) if is_numbers else b""


def _encoded_token_ids(found: Carried, name: str, value: bytes) -> None:  # noqa: ARG001  # the same
    """Base64 of 32-bit token ids: 16 characters carry three of them."""
    found.tokens += -(-len(value) * 3 // 16)
    found.prompts = max(found.prompts, 1)


def _object(harmless: frozenset[str]) -> _Carrier:
    """An object whose members are weighed in their turn, but for those that never reach the prompt."""

    def weigh(found: Carried, name: str, value: bytes) -> None:
        if value[:1] != b"{":
            _unread(found, name, value)
            return
        for member, raw in _members(value).items():
            inner = bytes(raw)
            if member not in harmless and inner != b"null":
                (_token_ids if member in _TOKEN_IDS else _unread)(found, member, inner)

    return weigh


_Carrier = Callable[[Carried, str, bytes], None]
_CARRIERS: Mapping[str, _Carrier] = {
    **dict.fromkeys(UNSIZED, _unsized),
    **dict.fromkeys(_TOKEN_IDS, _token_ids),
    "prompt_token_ids_b64": _encoded_token_ids,
    "input_embeds": _embeddings,
    "kv_transfer_params": _object(_TRANSFER_NAMES),
    "nvext": _object(_DYNAMO_NAMES),
    **dict.fromkeys(
        (
            *(
                "documents",
                "chat_template_kwargs",
                "previous_input_messages",
                "previous_response",
                "functions",
                "tools",
            ),
            *("response_format", "prediction", "suffix", "system", "instructions"),
        ),
        _text,
    ),
}
