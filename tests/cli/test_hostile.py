"""Every command before names that an attacker chose: no terminal obeys them, and no markup is read in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from sidecar.admin.tenant_routes import Tenants, Usage, UsageRow
from sidecar.policy.compiler import shipped_policies
from sidecar.tenants.registry import TenantRow
from tests.admin.test_request_page import story
from tests.cluster.views import overview, starved
from tests.support.in_process import ran
from tests.support.pages import serving_pages

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red on blue]n[/]\r\u202e\x9b2J"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[red on blue]n[/]\r\u202e\x9b2J"


def is_harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def documents() -> Mapping[str, object]:
    usage = UsageRow("2026-11-01", HOSTILE, HOSTILE, HOSTILE, 1, 2, 3)
    tenant = TenantRow(HOSTILE, "store", 1, {"tier": HOSTILE, "limits": {HOSTILE: 1}}, HOSTILE)
    return {
        "top": ("/overview", overview(starved(HOSTILE), pool=HOSTILE, notices=[HOSTILE])),
        "explain --request 1": ("/requests/1", story(HOSTILE)),
        "tenants list": ("/tenants?after=", Tenants([tenant], None, 1)),
        "tenants show x": ("/tenants/x", Tenants([tenant], None, 1)),
        "usage --from 2026-11-01 --to 2026-11-01 --by tenant,model": (
            "/usage?from=2026-11-01&to=2026-11-01",
            Usage([usage], HOSTILE),
        ),
    }


@pytest.mark.parametrize("command", documents())
def test_what_a_sidecar_reports_is_text(command: str) -> None:
    path, document = documents()[command]
    with serving_pages({path: (200, msgspec.json.encode(document).decode())}) as server:
        ended = ran(*command.split(), "--admin", server.url)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert is_harmless(ended.stdout), ended.stdout
    assert r"\x1b[2J[red on" in ended.stdout


def test_a_refusal_is_text() -> None:
    refusal = json.dumps({"error": {"code": "unknown_engine", "message": HOSTILE}})
    with serving_pages({"/engines": (404, refusal)}) as server:
        ended = ran("engines", "list", "--admin", server.url)
    assert (ended.returncode, ended.stderr) == (1, f"sidecar engines: {SHOWN}\n")


@pytest.mark.parametrize("command", ["doctor --read-only", "init --requests 8 --dir {folder}"])
def test_what_an_engine_says_of_itself_is_text(command: str, tmp_path: Path) -> None:
    pages = {
        "/v1/models": (200, json.dumps({"data": [{"id": HOSTILE, "owned_by": "vllm"}]})),
        "/version": (200, json.dumps({"version": HOSTILE})),
    }
    with serving_pages(pages) as server:
        ended = ran(*command.format(folder=tmp_path).split(), "--upstream", server.url)
    assert is_harmless(ended.stdout + ended.stderr), ended.stdout
    assert ended.stdout


def test_what_a_file_names_is_text(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 10, "output_length": 3, "tier": HOSTILE}
    (tmp_path / "trace.jsonl").write_text(json.dumps(row))
    (tmp_path / "body.json").write_text(
        json.dumps({"model": HOSTILE, "messages": ["hi"], "max_tokens": 1, "priority": HOSTILE})
    )
    (tmp_path / "policy.yaml").write_text(f"engine: {json.dumps(HOSTILE)}\n")
    with serving_pages({"/v1/models": (200, json.dumps({"data": [{"id": HOSTILE, "owned_by": "vllm"}]}))}) as server:
        for command in (
            f"replay {tmp_path}/trace.jsonl --upstream {server.url}",
            f"simulate {tmp_path}/trace.jsonl {shipped_policies()}",
            f"explain {shipped_policies()} --path /v1/chat/completions --body {tmp_path}/body.json",
            f"check {tmp_path}",
        ):
            ended = ran(*command.split())
            assert ended.returncode != 0
            assert is_harmless(ended.stdout + ended.stderr), (command, ended.stdout, ended.stderr)
            assert "owned" in ended.stdout + ended.stderr, command
