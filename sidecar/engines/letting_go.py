"""How long an engine may run on for a client that has hung up: only then is what the request held free again."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.policy.policy import EngineName

LETS_GO_WITHIN_S: Mapping[EngineName, float] = {
    # Its server asks whether the client is there once a second (openai_server.py: await_disconnected).
    EngineName.TENSORRT_LLM: 1.0,
    # Told by the server the moment the connection closes; the step under way is finished (with_cancellation).
    EngineName.VLLM: 0.1,
    # Asked every SGLANG_REQUEST_STATE_WAIT_TIMEOUT seconds, 4 as shipped (tokenizer_manager.py: _wait_one_response).
    EngineName.SGLANG: 4.0,
    # Its frontend cancels the request's context when the connection closes, and the worker aborts.
    EngineName.DYNAMO: 0.1,
    EngineName.NONE: 0.1,
}
"""Seconds from a closed connection to the engine's having let go, behind a reverse proxy that cannot see it."""
