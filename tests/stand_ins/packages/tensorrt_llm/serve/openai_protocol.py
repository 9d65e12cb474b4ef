"""From tensorrt_llm/serve/openai_protocol.py: which schemas refuse what they do not know, and where `priority` is.

0076e939: `priority` of completions and chat. OpenAIBaseModel forbids extra members, ResponsesRequest allows them, and
so does the Anthropic model of anthropic_protocol.py.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tensorrt_llm.build import HAS_FIELD


class OpenAIBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(OpenAIBaseModel):
    include_usage: bool = False


class _CompletionRequest(OpenAIBaseModel):
    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1


class _ChatCompletionRequest(OpenAIBaseModel):
    messages: list[dict[str, Any]]
    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1


if HAS_FIELD:

    class CompletionRequest(_CompletionRequest):
        priority: float | None = Field(default=None, ge=0.0, le=1.0)

    class ChatCompletionRequest(_ChatCompletionRequest):
        priority: float | None = Field(default=None, ge=0.0, le=1.0)

else:

    class CompletionRequest(_CompletionRequest):
        pass

    class ChatCompletionRequest(_ChatCompletionRequest):
        pass


class ResponsesRequest(OpenAIBaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    input: str | list[Any]
    max_output_tokens: int | None = None
    stream: bool = False


class AnthropicMessagesRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    stream: bool = False
