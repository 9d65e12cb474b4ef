"""Emulated OpenAI-compatible engine without a GPU, with a real engine's contract and errors.

`Emulator(EmulatorConfig(engine=Vllm)).app` is an ASGI app.
"""

from __future__ import annotations

from sidecar.tools.emulator.app import Emulator
from sidecar.tools.emulator.config import EmulatorConfig, Scheduling, StepModel

__all__ = ["Emulator", "EmulatorConfig", "Scheduling", "StepModel"]
