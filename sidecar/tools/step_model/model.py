"""Model of an engine: how long a step takes, and how much runs at once. A YAML file, or one of those that ship."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import yaml

DEFAULT = "llama-3.1-8b-h100"
MOST = 10**12
"""Largest figure of a model. As `kv_tokens` it says that the KV cache is never the limit."""


class BadEngineModel(ValueError):
    """A file that is no engine model. One line that names the file and the key."""


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine. A step takes `step_us`, and more for each running sequence and each prompt token that it computes.

    `kv_tokens` is the size of its KV cache, in blocks of `block_tokens`; a step computes `chunk_tokens` of prompts at
    most, and `max_sequences` run at once.
    """

    name: str
    step_us: float
    kv_tokens: int
    step_us_per_sequence: float = 0.0
    step_us_per_prefill_token: float = 0.0
    block_tokens: int = 16
    max_sequences: int = 256
    chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        for key in ("step_us", "step_us_per_sequence", "step_us_per_prefill_token"):
            value = getattr(self, key)
            if not (math.isfinite(value) and 0 <= value <= MOST):
                raise ValueError(f"{key} is {value}; write microseconds from 0 on")
        for key in ("kv_tokens", "block_tokens", "max_sequences", "chunk_tokens"):
            if not 1 <= getattr(self, key) <= MOST:
                raise ValueError(f"{key} is {getattr(self, key)}; write a whole number from 1 on")
        if self.kv_tokens < self.block_tokens:
            raise ValueError(f"kv_tokens is {self.kv_tokens}, less than a block of {self.block_tokens}")

    def duration_us(self, running: int, prefill_tokens: int) -> int:
        """The time of a step in whole microseconds, at least one."""
        exact = self.step_us + self.step_us_per_sequence * running + self.step_us_per_prefill_token * prefill_tokens
        return max(1, round(exact))

    def idle_first_us(self, prompt_tokens: int) -> int:
        """The time to the first token of a prompt that the engine computes alone."""
        whole, rest = divmod(prompt_tokens, self.chunk_tokens)
        return whole * self.duration_us(1, self.chunk_tokens) + (self.duration_us(1, rest) if rest else 0)

    @property
    def cost_us_per_output_token(self) -> float:
        """The engine's time for one output token where the batch is full."""
        return self.step_us / self.max_sequences + self.step_us_per_sequence


def shipped() -> list[str]:
    """The names of the models that ship."""
    found = files(__package__).joinpath("engines").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in found if file.name.endswith(".yaml"))


def load_model(name: str) -> EngineModel:
    """The model in a file, or the one of that name that ships. Raises BadEngineModel."""
    if name in shipped():
        text = files(__package__).joinpath("engines").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        return _read(name, text)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadEngineModel(f"{name}: is no text in UTF-8") from None
    except OSError as error:
        reason = error.strerror or error
        raise BadEngineModel(f"{name}: cannot be read ({reason}); those that ship are {', '.join(shipped())}") from None
    return _read(name, text)


def _read(name: str, text: str) -> EngineModel:
    try:
        tree: Any = yaml.safe_load(text)
        return msgspec.convert(tree, EngineModel)
    except yaml.YAMLError as error:
        raise BadEngineModel(f"{name}: is no YAML ({' '.join(str(error).split())})") from None
    except msgspec.ValidationError as error:
        raise BadEngineModel(f"{name}: {error}") from None
