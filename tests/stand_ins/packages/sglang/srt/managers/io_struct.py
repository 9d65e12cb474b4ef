"""From sglang/srt/managers/io_struct.py (0.5.23): the request that every endpoint makes for the tokenizer manager."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class GenerateReqInput:
    text: Any = None
    sampling_params: dict[str, Any] | None = None
    stream: bool = False
    priority: int | None = None
    rid: str | None = None

    def normalize_batch_and_arguments(self) -> None:
        """The real one splits a list of prompts into requests of their own later, all with this priority."""
