"""One small module per engine: which field or header carries a priority, in which direction and range."""

from __future__ import annotations

from sidecar.engines import dynamo, sglang, silent, tensorrt_llm, vllm
from sidecar.engines.dialect import CLIENT_MEMBERS, Dialect, Forward, Priority, client_headers, client_members
from sidecar.engines.dynamo import Dynamo
from sidecar.engines.routes import Routes
from sidecar.engines.sglang import Sglang
from sidecar.engines.silent import Silent
from sidecar.engines.tensorrt_llm import TensorRtLlm
from sidecar.engines.vllm import Vllm
from sidecar.policy.model import Carrier, EngineName

__all__ = [
    "CLIENT_MEMBERS",
    "Dialect",
    "Forward",
    "Priority",
    "Routes",
    "client_headers",
    "client_members",
    "dialect_of",
    "routes_of",
]

_ROUTES = {
    EngineName.TENSORRT_LLM: tensorrt_llm.ROUTES,
    EngineName.VLLM: vllm.ROUTES,
    EngineName.SGLANG: sglang.ROUTES,
    EngineName.DYNAMO: dynamo.ROUTES,
    EngineName.NONE: silent.ROUTES,
}


def dialect_of(engine: EngineName, carrier: Carrier | None) -> Dialect:
    """The adapter for an engine. `carrier` is None for its own default."""
    match engine:
        case EngineName.TENSORRT_LLM:
            return TensorRtLlm()
        case EngineName.VLLM:
            return Vllm(carrier)
        case EngineName.SGLANG:
            return Sglang(carrier)
        case EngineName.DYNAMO:
            return Dynamo()
        case EngineName.NONE:
            return Silent()


def routes_of(engine: EngineName) -> Routes:
    """What the paths of an engine's server do."""
    return _ROUTES[engine]
