"""APIs that guarded paths may speak, and the standard path of each."""

from __future__ import annotations

from enum import Enum


class Api(str, Enum):
    """An API whose requests are understood. The prompt and the maximum output are in different places in each.

    GENERIC is any other shape: the policy says what its requests hold.
    """

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    GENERIC = "generic"


STANDARD_APIS = {
    "/chat/completions": Api.CHAT,
    "/completions": Api.COMPLETIONS,
    "/responses": Api.RESPONSES,
    "/responses/compact": Api.RESPONSES,
    "/messages": Api.MESSAGES,
    "/embeddings": Api.EMBEDDINGS,
}
"""The end of a path, and the API of its requests. The first that fits applies."""

STANDARD_PATHS = tuple(f"/v1{suffix}" for suffix in STANDARD_APIS)

MODELS_PATH = "/v1/models"
"""Lists the models, and below it each one."""


def infer_api(path: str) -> Api | None:
    """The API of the requests on a path, known from how the path ends."""
    return next((api for suffix, api in STANDARD_APIS.items() if path.endswith(suffix)), None)
