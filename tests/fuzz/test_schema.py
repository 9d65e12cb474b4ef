"""schemathesis, by a schema of the guarded surface and the admin pages, against a real `sidecar serve` before a server.

It sends what the schema allows, and what it does not; whatever comes back has to be in the schema.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from tests.fuzz.scale import cases, tried
from tests.security.behind import Behind, standing

schemathesis = pytest.importorskip("schemathesis")
TOKEN = "token-of-the-fuzzed-sidecar"  # as openapi.yaml has it
DOCUMENT = yaml.safe_load((Path(__file__).parent / "openapi.yaml").read_text())
OPERATIONS = {
    result.ok().label: result.ok() for result in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
}
IS_ADMIN = {label for label in OPERATIONS if not label.startswith("POST ")}
WAYS = [
    (label, mode)
    for label in OPERATIONS
    for mode in ("positive", "negative")
    if mode == "positive" or label not in {"GET /healthz", "GET /readyz"}  # which take nothing that could be wrong
]
CHECKS = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in ("not_a_server_error", "status_code_conformance", "response_schema_conformance")
]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("policy")
    with standing("httptools", folder, SIDECAR_LOG_LEVEL="error", SIDECAR_ADMIN_TOKEN=TOKEN) as found:
        yield found


@pytest.mark.parametrize(("label", "mode"), WAYS)
def test_whatever_is_asked_by_the_schema_or_against_it(behind: Behind, label: str, mode: str) -> None:
    strategy = OPERATIONS[label].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    base = behind.admin if label in IS_ADMIN else behind.url

    @cases(few=4, many=120)
    @given(strategy)
    def check(case: Any) -> None:
        tried["by the schema"] += 1
        answer = case.call(base_url=base, timeout=20, allow_redirects=False)
        case.validate_response(answer, checks=CHECKS)

    check()
    end_s = time.monotonic() + 10
    while (left := under_way(behind)) != 0:
        assert time.monotonic() < end_s, left


def under_way(behind: Behind) -> int:
    asked = urllib.request.Request(f"{behind.admin}/state", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        state = json.load(answer)
    assert state["pool"]["waiting"] == 0
    return int(state["under_way"])
