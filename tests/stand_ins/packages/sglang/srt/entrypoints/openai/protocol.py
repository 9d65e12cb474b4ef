"""From sglang/srt/entrypoints/openai/protocol.py and anthropic/protocol.py (0.5.23): the requests.

Every field is here by name. Those that the stand-in reads have their type, the others take any value. What a schema
does not know is ignored, unlike TensorRT-LLM's. `tests/stand_ins/test_fields.py` compares the names with the real
source where SGLang is installed.
"""

from typing import Any

from pydantic import BaseModel, create_model

CHAT_FIELDS = """
bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank messages model frequency_penalty
logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty response_format seed stop
stream stream_options temperature top_p user tools tool_choice parallel_tool_calls return_hidden_states
return_routed_experts routed_experts_start_len return_cached_tokens_details return_spec_tokens_details
return_prompt_token_ids return_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
reasoning_effort thinking task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex
no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path session_id session_params
separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video
images_config video_config mm_processor_kwargs custom_logit_processor custom_params watermark input_ids rid
extra_key cache_salt priority data_parallel_rank
"""
COMPLETION_FIELDS = """
bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank model prompt best_of echo
frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options suffix
temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_spec_tokens_details return_token_ids top_k min_p min_tokens json_schema regex
ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id
session_params response_format custom_params custom_logit_processor watermark images_config mm_processor_kwargs
data_parallel_rank rid extra_key cache_salt priority custom_labels
"""
RESPONSES_FIELDS = """
bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank background include input
instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls previous_response_id reasoning
service_tier store stream temperature text tool_choice tools top_logprobs top_p truncation user chat_template_kwargs
request_id session_id priority extra_key cache_salt data_parallel_rank frequency_penalty presence_penalty stop top_k
min_p repetition_penalty
"""
EMBEDDING_FIELDS = """
input model encoding_format dimensions user rid priority lora_path embed_override_token_id embed_overrides
"""
MESSAGES_FIELDS = """
model messages max_tokens metadata stop_sequences stream system temperature thinking tool_choice tools top_k top_p
output_config betas
"""


def _schema(name: str, fields: str, **typed: Any) -> type[BaseModel]:
    return create_model(name, **dict.fromkeys(fields.split(), (Any, None)) | typed)


_MESSAGES = (list[dict[str, Any]], ...)
_PRIORITY = (int | None, None)
_STREAM = (bool, False)

ChatCompletionRequest = _schema(
    "ChatCompletionRequest",
    CHAT_FIELDS,
    messages=_MESSAGES,
    model=(str, "default"),
    max_tokens=(int | None, None),
    max_completion_tokens=(int | None, None),
    stream=_STREAM,
    priority=_PRIORITY,
)
CompletionRequest = _schema(
    "CompletionRequest",
    COMPLETION_FIELDS,
    prompt=(list[int] | list[list[int]] | str | list[str], ...),
    model=(str, "default"),
    max_tokens=(int, 16),
    stream=_STREAM,
    priority=_PRIORITY,
)
ResponsesRequest = _schema(
    "ResponsesRequest",
    RESPONSES_FIELDS,
    input=(str | list[Any], ...),
    max_output_tokens=(int | None, None),
    stream=_STREAM,
    priority=(int, 0),
)
EmbeddingRequest = _schema(
    "EmbeddingRequest", EMBEDDING_FIELDS, input=(Any, ...), model=(str, "default"), priority=_PRIORITY
)
AnthropicMessagesRequest = _schema(
    "AnthropicMessagesRequest",
    MESSAGES_FIELDS,
    model=(str, ...),
    messages=_MESSAGES,
    max_tokens=(int, ...),
    stream=_STREAM,
)
