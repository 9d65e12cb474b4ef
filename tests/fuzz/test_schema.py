"""schemathesis against a real `sidecar serve`: what a schema allows, and what it does not.

Whatever comes back has to be in the schema. The guarded surface has a schema here, and the admin port serves its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from sidecar.admin import openapi
from sidecar.admin.operations import PATH
from tests.fuzz.scale import cases, tried
from tests.security.behind import Behind, standing
from tests.support.http import fetch
from tests.support.redis_servers import until
from tests.support.shared_pools import begun_store

TOKEN = "token-of-the-fuzzed-sidecar"
TOKENS = (TOKEN, TOKEN, TOKEN, "wrong", None)
KNOWN = {"id": "a-known-request"}
SHAPE = ("status_code_conformance", "response_schema_conformance")


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The same, where an answer with a member that is not described is a mistake."""
    document = copy.deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        if "properties" in schema and name != "Error":  # which has more members where no page was reached
            schema.setdefault("additionalProperties", False)
    return document


class Surface:
    """What a description lets one ask. Its checks are those of the answers."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemathesis = pytest.importorskip("schemathesis")
        schema = self._schemathesis.openapi.from_dict(document)
        schema.validate()
        self.operations = {found.ok().label: found.ok() for found in schema.get_all_operations()}

    def checks(self, *names: str) -> list[Any]:
        """Those of these names."""
        return [self._schemathesis.checks.CHECKS.get_one(name) for name in names]

    def ways(self) -> Iterator[tuple[str, str, Any]]:
        """What is sent: by the schema and, where anything could be wrong, against it. Any text is right in a path."""
        for label, one in self.operations.items():
            takes_any = bool(one.body) or bool([*one.query, *one.headers])
            for mode in ("positive", "negative") if takes_any else ("positive",):
                yield label, mode, one.as_strategy(generation_mode=self._schemathesis.GenerationMode(mode))


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("policy")
    with standing("httptools", folder, SIDECAR_LOG_LEVEL="error", SIDECAR_ADMIN_TOKEN=TOKEN) as found:
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """A sidecar with all that the admin port can have: a store, tenants there, and engines."""
    folder, data = tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("store")
    environment = {"SIDECAR_LOG_LEVEL": "error", "SIDECAR_ADMIN_TOKEN": TOKEN}
    with begun_store(data) as store:
        more = f"store: {store.url}\nstored_tenants: true\n"
        with standing("httptools", folder, more, in_engines=True, **environment) as found:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            url = f"{found.url}/v1/chat/completions"
            assert fetch(url, body, key="sk-acme", x_request_id=KNOWN["id"]).status == 200
            yield found


def test_whatever_is_asked_by_the_schema_or_against_it(behind: Behind) -> None:
    surface = Surface(yaml.safe_load((Path(__file__).parent / "openapi.yaml").read_text()))
    checks = surface.checks("not_a_server_error", *SHAPE)
    ways = list(surface.ways())
    assert len(ways) > 10
    for _, _, strategy in ways:

        @cases(few=4, many=120)
        @given(strategy)
        def check(case: Any) -> None:
            tried["by the schema"] += 1
            answer = case.call(base_url=behind.url, timeout=20, allow_redirects=False)
            case.validate_response(answer, checks=checks)

        check()
    until(lambda: under_way(behind) == 0, "all are over")


def test_the_admin_port_answers_as_it_says(behind: Behind, whole: Behind) -> None:
    surface = Surface(strict(openapi.document()))
    del surface.operations["GET /overview/stream"]  # it does not end; tests/admin/test_stream.py reads it
    checks = surface.checks(*SHAPE, "content_type_conformance")  # 503 is an answer here
    ways = list(surface.ways())
    assert len(ways) > 20
    for label, mode, strategy in ways:
        try_the_admin_port(label, mode == "positive", strategy, [whole, whole, behind], checks)


def try_the_admin_port(label: str, is_right: bool, strategy: Any, servers: list[Behind], checks: list[Any]) -> None:
    @cases(few=8, many=240)
    @given(strategy, some.sampled_from(servers), some.booleans(), some.sampled_from(TOKENS))
    def check(case: Any, asked: Behind, is_known: bool, token: str | None) -> None:
        tried["by the admin port's own description"] += 1
        if is_known and is_right:
            name_what_is_there(case, label)
        case.headers = {**(case.headers or {}), **({} if token is None else {"authorization": f"Bearer {token}"})}
        answer = case.call(base_url=asked.admin, timeout=20, allow_redirects=False)
        case.validate_response(answer, checks=checks)
        if token != TOKEN and label not in {"GET /healthz", "GET /readyz"}:
            assert answer.status_code in (401, 400, 431), answer.text

    check()


def name_what_is_there(case: Any, label: str) -> None:
    """Most of what a schema allows is the name of nothing."""
    known = {**KNOWN, "name": "e0" if "engines" in label else "acme"}
    for part in (case.path_parameters, case.query):
        part.update({name: known[name] for name in part if name in known})
    if label == "POST /tenants":
        case.body = {"tenant": "bulk", "tier": "batch", "keys": ["sha256:" + 64 * "a"]}


def test_the_port_serves_what_was_tried(whole: Behind) -> None:
    assert shown(whole, PATH) == json.loads(json.dumps(openapi.document()))


def under_way(behind: Behind) -> int:
    state = shown(behind, "/state")
    assert state["pool"]["waiting"] == 0
    return int(state["under_way"])


def shown(behind: Behind, path: str) -> Any:
    return fetch(behind.admin + path, key=TOKEN).json
