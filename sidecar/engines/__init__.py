"""Engines: one class in one file for each, the interface that they implement, and their registry."""

from __future__ import annotations

from sidecar.engines.base import Engine
from sidecar.engines.dynamo import Dynamo
from sidecar.engines.registry import ENGINES, NoPriorityEngine
from sidecar.engines.sglang import Sglang
from sidecar.engines.tensorrt_llm import TensorRtLlm
from sidecar.engines.vllm import Vllm

__all__ = ["ENGINES", "Dynamo", "Engine", "NoPriorityEngine", "Sglang", "TensorRtLlm", "Vllm"]
