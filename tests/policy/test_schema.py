from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from sidecar.policy.compiler import load
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.schema import SCHEMAS, schema_document
from tests.policy.files import pool
from tests.support.each import each

POLICIES = Path(__file__).parents[2] / "policies"
OLD_PYDANTIC = int(pydantic.VERSION.split(".")[1]) < 11

SCRIPT = runpy.run_path(str(POLICIES.parent / "docs" / "policy_reference.py"))


@pytest.mark.skipif(OLD_PYDANTIC, reason="it writes the same in other words, and in another order")
def test_the_schemas_and_the_reference_are_current() -> None:
    for file, text in SCRIPT["texts"]().items():
        assert file.read_text(encoding="utf-8") == text, "run: python docs/policy_reference.py"


@each("kind", SCHEMAS.values())
def test_every_key_says_what_it_is_for(kind: type) -> None:
    assert [name for part in _mappings(kind) for name, key in part.items() if not key["description"]] == []


def _mappings(kind: type) -> list[dict[str, Any]]:
    """The keys of a file, and those of the mappings inside it."""
    document = schema_document(kind)
    return [part["properties"] for part in (document, *document.get("$defs", {}).values())]


def test_the_examples_of_the_reference_are_read(tmp_path: Path) -> None:
    keys = schema_document(PoolFile)["properties"]
    written = {name: key["examples"][0] for name, key in keys.items() if "examples" in key}
    del written["tenants"]  # no file is there
    written |= {"engine": "vllm", "sources": ["engine", "service_tier"], "engine_levels": {"high": 5, "normal": 10}}
    written["service_tiers"]["flex"] = "normal"  # there are two tiers
    written |= {"default_tier": "normal", "anonymous": "normal", "aging": {"promote_after": "5m", "ceiling": "normal"}}
    written["models"] = {"llama-70b": {"engines": ["a"]}}
    for without in (("engines", "models"), ("capacity",)):
        text = yaml.safe_dump({name: value for name, value in written.items() if name not in without}, sort_keys=False)
        load(pool(tmp_path, text))


@each("path", [POLICIES / "policy.yaml", *sorted((POLICIES / "tenants").glob("*.yaml"))], ids=str)
def test_a_shipped_file_names_its_schema_for_editors(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve().is_file()


def test_the_reference_names_every_key_of_every_mapping() -> None:
    text = SCRIPT["reference_text"]()
    names = {name for kind in SCHEMAS.values() for part in _mappings(kind) for name in part}
    assert {name for name in names if f"- `{name}`" not in text and f"- [`{name}`](" not in text} == set()


def test_the_reference_leads_to_every_section() -> None:
    text = SCRIPT["reference_text"]()
    links = re.findall(r"\[`\w+`\]\(#([a-z_]+)\)", text)
    headings = {
        "".join(re.findall(r"[a-z_]", heading.lower())) for heading in re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    }
    assert set(links) == {heading.lower().replace(".", "") for heading in headings}
