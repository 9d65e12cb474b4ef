"""The requests of the public traces, with a max_tokens for each, which the traces do not have.

A trace is read from a folder that is no part of this project. `azure_conv.csv` and `azure_code.csv` are the Azure
Public Dataset's AzureLLMInferenceTrace of 2023 (CC-BY 4.0), `mooncake_conversation.jsonl` is the Mooncake project's
FAST'25 release (Apache-2.0).

The old rule's figures depend on max_tokens. Here all clients of a trace send the same: the first power of two above
99.9% of the trace's outputs. That is how applications set it: once, so that almost no answer is cut. 99.9% of the
outputs have at most 954 tokens (Azure-conv), 824 (Azure-code) and 2,000 (Mooncake), so it is 1,024, 1,024 and 2,048.
The few longer outputs send what they use. This reproduces the specification's shares of the old rule.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NOT_CUT = 0.999
"""The share of outputs that max_tokens does not cut."""
FOLDER = Path(__file__).parents[3] / "shared" / "traces"


class Asked(NamedTuple):
    """One request: prompt and output in tokens, what its client sends as max_tokens, and its tenant."""

    prompt: int
    output: int
    max_tokens: int | None
    tenant: str = "tenant"
    streams: bool = True


@dataclass(frozen=True)
class Trace:
    """A public trace: its file, and the share of the KV cache that the specification measured with the old rule."""

    name: str
    file: str

    def lengths(self, folder: Path) -> list[tuple[int, int]]:
        """Prompt and output of every request, in order of arrival. Raises OSError where the file is not there."""
        with (folder / self.file).open() as lines:
            if self.file.endswith(".csv"):
                return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]
            return [(row["input_length"], row["output_length"]) for row in map(json.loads, lines)]


CONV = Trace("Azure-conv", "azure_conv.csv")
CODE = Trace("Azure-code", "azure_code.csv")
MOONCAKE = Trace("Mooncake conversation", "mooncake_conversation.jsonl")


def max_tokens_of(lengths: Sequence[tuple[int, int]]) -> int:
    """The first power of two that 99.9% of the outputs do not exceed."""
    outputs = sorted(output for _, output in lengths)
    enough = outputs[int(NOT_CUT * (len(outputs) - 1))]
    return int(1 << (enough - 1).bit_length())


def asked(lengths: Sequence[tuple[int, int]], seed: int) -> list[Asked]:
    """The requests of a trace. A seed chooses where in the trace the run begins; the order of the trace stays."""
    most = max_tokens_of(lengths)
    start = random.Random(seed).randrange(len(lengths)) if seed else 0
    turned = [*lengths[start:], *lengths[:start]]
    return [Asked(prompt, output, max(most, output)) for prompt, output in turned]
