"""The part of docs/write-a-policy.md that needs no issuer, run as it is written there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
PAGE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"


def run(folder: Path, *words: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_tenant_by_token_from_nothing(tmp_path: Path) -> None:
    page = PAGE.read_text()
    part = page.partition("### Without an issuer")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```", part, re.MULTILINE | re.DOTALL))
    (tenant,) = re.findall(r"```yaml\n *(tenant: acme\n.*?)```", page, re.DOTALL)
    (tmp_path / "policies" / "tenants").mkdir(parents=True)
    (tmp_path / "policies" / "policy.yaml").write_text(blocks["yaml"])
    (tmp_path / "policies" / "tenants" / "acme.yaml").write_text(re.sub(r"^ +", "", tenant, flags=re.MULTILINE))
    (tmp_path / "issuer.py").write_text(blocks["python"])
    (tmp_path / "token.txt").write_text(run(tmp_path, "issuer.py"))
    explain = ("explain", "policies/", "--path", "/v1/chat/completions", "--key-file", "token.txt")
    said = run(tmp_path, "-m", "sidecar.cli", *explain)
    shown = blocks[""].partition("token.txt\n$ sidecar explain")[2].partition("\n")[2].partition("...\n")[0]
    assert said.startswith(shown)
    assert len(shown.splitlines()) == 10
