"""The parts, put together: from a path, a policy, or the environment alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sidecar
from sidecar.admission.controller import AdmissionController
from sidecar.app import AdmissionMiddleware
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.problems import PolicyError
from tests.support.middleware import SMALL, App, Caller, policy, write_policy


@pytest.fixture(autouse=True)
def _no_policy_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)


@pytest.mark.parametrize("kind", ["file", "folder", "text", "loaded"])
def test_a_policy_is_a_file_a_folder_or_a_loaded_one(tmp_path: Path, kind: str) -> None:
    file = write_policy(tmp_path)
    of_kind = {"file": file, "folder": tmp_path, "text": str(file), "loaded": policy()}[kind]
    middleware = AdmissionMiddleware(App(), policy=of_kind)
    assert isinstance(middleware.controller, AdmissionController)
    assert [tier.name for tier in middleware.controller.policy.tiers] == ["critical", "high", "normal", "batch"]


@pytest.mark.anyio
async def test_the_environment_says_where_the_policy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, str(write_policy(tmp_path)))
    caller = Caller(AdmissionMiddleware(App()), SMALL)
    await caller.run()
    assert caller.status == 200
    assert (b"x-admission-tier", b"normal") in caller.sent[0]["headers"]


def test_what_is_passed_beats_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "nowhere.yaml"))
    AdmissionMiddleware(App(), policy=policy())


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_policy_it_says_how_to_give_one(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(POLICY_VARIABLE, value)
    with pytest.raises(ValueError, match=r"policy=.*SIDECAR_POLICY"):
        AdmissionMiddleware(App())


def test_a_policy_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "nowhere.yaml"))
    with pytest.raises(PolicyError, match=r"nowhere\.yaml"):
        AdmissionMiddleware(App())


def test_a_bad_policy_is_refused_with_file_and_line(tmp_path: Path) -> None:
    write_policy(tmp_path, engine="vlm")
    with pytest.raises(PolicyError, match=r"policy\.yaml:1: engine: .*vllm"):
        AdmissionMiddleware(App(), policy=tmp_path)


def test_the_packages_own_name_for_it_is_the_same_class() -> None:
    assert sidecar.AdmissionMiddleware is AdmissionMiddleware
    with pytest.raises(AttributeError, match="no attribute 'Admision'"):
        _ = sidecar.Admision


@pytest.mark.long
@pytest.mark.parametrize("lifespan", ["auto", "on"])
def test_a_server_with_a_bad_policy_does_not_start(tmp_path: Path, lifespan: str) -> None:
    """Starlette makes its middleware when it starts, and uvicorn takes an exception there for no lifespan at all."""
    write_policy(tmp_path, engine="vlm")
    (tmp_path / "served.py").write_text(
        "from fastapi import FastAPI\n"
        "from sidecar import AdmissionMiddleware\n"
        "app = FastAPI()\n"
        f"app.add_middleware(AdmissionMiddleware, policy={str(tmp_path)!r})\n"
    )
    command = [sys.executable, "-m", "uvicorn", "served:app", "--port", "0", "--lifespan", lifespan]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode != 0
    assert "policy.yaml:1: engine:" in ended.stderr
    assert "Application startup failed" in ended.stderr
    assert "Traceback" not in ended.stderr
