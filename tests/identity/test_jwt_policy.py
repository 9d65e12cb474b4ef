"""The policy's section on tokens: its mistakes with file and line, and what the commands say of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.policy.compiler import load
from sidecar.policy.diff import describe_changes
from sidecar.policy.identity import ALGORITHMS
from sidecar.policy.problems import PolicyError
from tests.identity.issuer import Issuer, ec, jwt_section
from tests.support.each import each
from tests.support.in_process import output
from tests.support.middleware import policy, write_policy

URL = "https://id.example/keys"


@each(
    ("more", "line", "words"),
    [
        ({"algorithms": "[RS256, none]"}, 26, "private key"),
        ({"algorithms": "[HS256]"}, 26, "private key"),
        ({"algorithms": "[RS257]"}, 26, "RS256"),
        ({"algorithms": "[]"}, 26, "something in it"),
        ({"algorithms": "[RS256, RS256]"}, 26, "twice"),
        ({"clock_skew": "10m"}, 26, '"5m" or less'),
        ({"jwks": "http://id.example/keys"}, 24, "not encrypted"),
        ({"jwks": "ftp://id.example/keys"}, 24, "neither https:// nor a file"),
        ({"jwks": "https://me:secret@id.example/keys"}, 24, "password"),
        ({"jwks": "https://"}, 24, "has no host"),
        ({"jwks": "missing.json"}, 24, "cannot be read"),
        ({"jwks": "tenants/acme.yaml"}, 24, "not JSON"),
        ({"tenant_claim": ""}, 25, "nothing is written here"),
        ({"secret": "x"}, 26, "no such key"),
    ],
)
def test_each_mistake_is_reported_with_its_line(tmp_path: Path, more: dict[str, str], line: int, words: str) -> None:
    path = write_policy(
        tmp_path,
        jwt_section(
            **{"key_set": URL} | {"key_set" if name == "jwks" else name: value for name, value in more.items()}
        ),
    )
    with pytest.raises(PolicyError) as refused:
        load(path)
    (problem,) = refused.value.problems
    assert words in problem.message
    assert "secret@" not in str(refused.value)
    assert problem.place.line == line - 1


def test_no_algorithm_of_a_shared_secret_is_known() -> None:
    assert not any(name.startswith("HS") or name == "none" for name in ALGORITHMS)


def test_a_tenant_may_be_without_keys_only_where_tokens_can_name_it(tmp_path: Path) -> None:
    write_policy(tmp_path, jwt_section(URL))
    (tmp_path / "tenants" / "keyless.yaml").write_text("tenant: keyless\ntier: high\n")
    assert load(tmp_path).named["keyless"].level == 1
    write_policy(tmp_path)
    with pytest.raises(PolicyError, match=r"keyless.yaml.*keys: missing; write keys"):
        load(tmp_path)


def test_without_the_package_the_start_fails_and_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PolicyError, match=r"pip install '\./admission-sidecar\[jwt\]'"):
        policy(jwt_section(URL))
    assert policy().jwt is None


def test_a_reload_says_what_has_changed_of_tokens() -> None:
    none, one = policy(), policy(jwt_section(URL))
    assert describe_changes(none, one) == "jwt none -> tokens of https://id.example"
    assert describe_changes(one, policy(jwt_section(URL, clock_skew="10s"))) == "jwt clock_skew 30s -> 10s"


def test_check_says_whose_tokens_count(tmp_path: Path) -> None:
    write_policy(tmp_path, jwt_section(URL))
    assert "\n  with a token of https://id.example: as its tenant says\n" in output("check", tmp_path)
    write_policy(tmp_path)
    assert "token of" not in output("check", tmp_path)


def test_explain_says_who_a_token_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    issuer = Issuer(ec())
    (tmp_path / "keys.json").write_text(issuer.key_set())
    write_policy(tmp_path, jwt_section("keys.json"))

    def explained(token: str) -> Any:
        found = tmp_path / "found.json"
        main(["explain", str(tmp_path), "--path", "/v1/chat/completions", "--key", token, "--json", str(found)])
        assert token not in capsys.readouterr().out
        return json.loads(found.read_text())

    assert explained(issuer.token())["tenant"]["by"].startswith("its token")
    assert explained(issuer.token(exp=5))["error"]["code"] == "invalid_token"
