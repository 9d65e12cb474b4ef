"""The stand-ins' request fields, against the real source where that is installed."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

from tests.real.lab import installed_in

pytestmark = pytest.mark.long

PACKAGES = Path(__file__).parent / "packages"
SGLANG = "sglang/srt/entrypoints"


def real_fields(source: Path, name: str) -> set[str]:
    """The fields of a pydantic model and of its bases in the same file, without importing it."""
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        node = classes[waiting.pop()]
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        targets = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        found |= {each.id for each in targets if isinstance(each, ast.Name) and not each.id.startswith("_")}
    return found - {"model_config"}


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("openai/protocol.py", "ChatCompletionRequest", "CHAT_FIELDS"),
        ("openai/protocol.py", "CompletionRequest", "COMPLETION_FIELDS"),
        ("openai/protocol.py", "ResponsesRequest", "RESPONSES_FIELDS"),
        ("openai/protocol.py", "EmbeddingRequest", "EMBEDDING_FIELDS"),
        ("anthropic/protocol.py", "AnthropicMessagesRequest", "MESSAGES_FIELDS"),
    ],
)
def test_sglangs_fields_are_those_of_the_real_source(file: str, name: str, ours: str) -> None:
    installed = next(iter((installed_in() / "sglang" / "lib").glob(f"*/site-packages/{SGLANG}/{file}")), None)
    if installed is None:
        pytest.skip("sglang is not installed: run run_sglang.sh of the engine lab once, which installs it")
    stand_in = runpy.run_path(str(PACKAGES / SGLANG / "openai" / "protocol.py"))
    assert set(stand_in[ours].split()) == real_fields(installed, name)


def test_tensorrt_llms_schemas_have_exactly_the_fields_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """47 of chat and 35 of completions were found missing once: a list that shrinks is noticed."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    stand_in = runpy.run_path(str(PACKAGES / "tensorrt_llm" / "serve" / "openai_protocol.py"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[module]  # no other test of this process shall find the stand-in
    counts = {"CHAT": 54, "COMPLETION": 42, "RESPONSES": 25, "MESSAGES": 16}
    schemas = ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest", "AnthropicMessagesRequest")
    for (name, count), schema in zip(counts.items(), schemas, strict=True):
        fields = stand_in[f"{name}_FIELDS"].split()
        assert len(set(fields)) == len(fields) == count, name
        assert list(stand_in[schema].model_fields) == fields, name
