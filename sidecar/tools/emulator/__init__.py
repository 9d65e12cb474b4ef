"""Emulated OpenAI-compatible engine without a GPU, with a real engine's contract and errors.

`Emulator(EmulatorConfig(engine=EngineName.VLLM)).app` is an ASGI app. `batch` is the step model on its own.
"""

from __future__ import annotations

from sidecar.tools.emulator.app import Emulator
from sidecar.tools.emulator.batch import StepModel
from sidecar.tools.emulator.config import EmulatorConfig, Scheduling

__all__ = ["Emulator", "EmulatorConfig", "Scheduling", "StepModel"]
