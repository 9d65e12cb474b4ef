from __future__ import annotations

import re
from pathlib import Path

import pydantic
import pytest

from sidecar.policy.file_model import FileModel
from sidecar.policy.reference import reference_text
from sidecar.policy.schema import SCHEMAS, schema_text
from tests.support.each import each

POLICIES = Path(__file__).parents[2] / "policies"
OLD_PYDANTIC = int(pydantic.VERSION.split(".")[1]) < 11


@pytest.mark.skipif(OLD_PYDANTIC, reason="it writes the same schema in other words")
@each("name", SCHEMAS)
def test_the_schema_in_policies_is_current(name: str) -> None:
    written = (POLICIES / name).read_text(encoding="utf-8")
    assert schema_text(SCHEMAS[name]) == written, "run: python -m sidecar.policy.schema"


@each("model", SCHEMAS.values())
def test_every_key_says_what_it_is_for(model: type) -> None:
    for part in [model, *_inner(model)]:
        assert [name for name, field in part.model_fields.items() if not field.description] == []


def _inner(model: type) -> list[type]:
    """The models inside one."""
    known = {part.__name__: part for part in FileModel.__subclasses__()}
    return [known[name] for name in model.model_json_schema().get("$defs", {})]


@each("path", [POLICIES / "policy.yaml", *sorted((POLICIES / "tenants").glob("*.yaml"))], ids=str)
def test_a_shipped_file_names_its_schema_for_editors(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve().is_file()


def test_the_reference_in_docs_is_current() -> None:
    written = (POLICIES.parent / "docs" / "policy.md").read_text(encoding="utf-8")
    assert reference_text() == written, "run: python -m sidecar.policy.reference"


def test_the_reference_names_every_key_of_every_mapping() -> None:
    text = reference_text()
    for model in SCHEMAS.values():
        for part in [model, *_inner(model)]:
            missing = [name for name, field in part.model_fields.items() if f"| `{field.alias or name}` |" not in text]
            assert missing == []


def test_the_reference_leads_to_every_section() -> None:
    text = reference_text()
    links = re.findall(r"\[below\]\(#([a-z_]+)\)", text)
    headings = {
        "".join(re.findall(r"[a-z_]", heading.lower())) for heading in re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    }
    assert set(links) == {heading.lower().replace(".", "") for heading in headings}
