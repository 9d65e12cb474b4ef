"""examples/signed_tokens, which needs no issuer, run as it is written there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
PAGE = Path(__file__).parents[2] / "examples" / "signed_tokens" / "README.md"


def run(folder: Path, *words: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_tenant_by_token_from_nothing(tmp_path: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    policy, tenant, issuer, transcript = blocks
    (tmp_path / "policies" / "tenants").mkdir(parents=True)
    (tmp_path / "policies" / "policy.yaml").write_text(policy)
    (tmp_path / "policies" / "tenants" / "acme.yaml").write_text(tenant)
    (tmp_path / "issuer.py").write_text(issuer)
    (tmp_path / "token.txt").write_text(run(tmp_path, "issuer.py"))
    explain = ("explain", "policies/", "--path", "/v1/chat/completions", "--key-file", "token.txt")
    said = run(tmp_path, "-m", "sidecar.cli", *explain)
    shown = transcript.partition("token.txt\n$ sidecar explain")[2].partition("\n")[2].partition("...\n")[0]
    assert said.startswith(shown)
    assert len(shown.splitlines()) == 10
