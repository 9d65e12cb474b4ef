"""What runs, as an operator asks for it: the version, the commit of a release, and the layout of the store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sidecar
from sidecar import version
from tests.support.in_process import ran
from tests.support.middleware import App, Guarded, policy


def test_the_command_says_the_version_the_layout_and_a_releases_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "__file__", str(tmp_path / "version.py"))
    assert ran("--version").stdout == f"admission-sidecar {sidecar.__version__} (store layout {version.STORE_LAYOUT})\n"
    (tmp_path / "commit.txt").write_text("0123456789ab\n")
    said = ran("--version").stdout
    assert (
        said == f"admission-sidecar {sidecar.__version__} (commit 0123456789ab, store layout {version.STORE_LAYOUT})\n"
    )


def test_state_says_it_of_the_policys_own_pool() -> None:
    state = Guarded(App(), policy()).sidecar.state()["version"]
    assert (state["version"], state["store_layout"]) == (sidecar.__version__, str(version.STORE_LAYOUT))
    assert state["commit"] is None or re.fullmatch("[0-9a-f]{12}", state["commit"])
