"""The engine watch at the start of `sidecar serve` and of a mounted app, and on the pages of a shared pool."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.policy.compiler import shipped_policies
from sidecar.policy.store import STORE_VARIABLE
from tests.support.http import fetch
from tests.support.in_process import emulated_engine, ran, served_sidecar, start_failure
from tests.support.late import fastapi
from tests.support.shared_pools import begun_store

VLLM = """\
engine: vllm
capacity: {tokens: 100k, requests: 8}
tiers: {high: {reserve: 10%}, batch: {reserve: 10%}}
default_tier: batch
anonymous: high
sources: [header, key]
"""


def page(url: str) -> tuple[int, Any]:
    answer = fetch(url)
    return answer.status, answer.json


def until(url: str, is_so: Callable[[int, Any], bool], within_s: float = 60.0) -> Any:
    """The page, when it is so."""
    ends_s = time.monotonic() + within_s
    while not is_so(*(found := page(url))):
        assert time.monotonic() < ends_s, found
        time.sleep(0.05)
    return found[1]


def failed_start(upstream: str, policy: str) -> subprocess.CompletedProcess[str]:
    return ran("serve", "--upstream", upstream, "--policy", policy, "--port", "0", "--admin-port", "0")


@contextmanager
def beside(folder: Path, kind: str, policy: str) -> Iterator[str]:
    """An emulated engine and a sidecar before it, both in threads of this process: the sidecar's admin port."""
    with emulated_engine("--engine", kind) as upstream, before(folder / "policy.yaml", upstream, policy) as admin:
        yield admin


@contextmanager
def before(path: Path, upstream: str, policy: str) -> Iterator[str]:
    """A sidecar before an engine at this address: its admin port."""
    path.write_text(policy)
    with served_sidecar(path, upstream) as (_, admin):
        yield admin


# -- at the start


def test_the_shipped_policies_do_not_start_before_a_vllm() -> None:
    with emulated_engine("--engine", "vllm") as upstream:
        ended = failed_start(upstream, str(shipped_policies()))
    assert ended.returncode == 1
    assert ended.stdout == ""
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(
        f"sidecar: {upstream} is vLLM (/v1/models says so), but the policy says engine: tensorrt-llm"
    )
    assert "policy.yaml:7); write engine: vllm, or give --upstream the address of a TensorRT-LLM" in said
    assert "SIDECAR_ENGINE_CHECK=alive" in said
    assert "Traceback" not in ended.stderr


def test_each_engine_is_known_as_itself(tmp_path: Path) -> None:
    for kind in ("vllm", "sglang", "tensorrt-llm", "dynamo"):
        with beside(tmp_path, kind, VLLM.replace("vllm", kind)) as admin:
            status, ready = page(f"{admin}/readyz")
            assert (status, ready["notices"]) == (200, [])
            state = page(f"{admin}/state")[1]["engine"]
            assert (state["state"], state["answers"]) == ("up", kind)


@pytest.mark.parametrize(("check", "state"), [("alive", "up"), ("off", "unknown")])
def test_the_operator_may_have_another_engine(
    check: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_CHECK", check)
    with beside(tmp_path, "vllm", VLLM.replace("vllm", "sglang")) as admin:
        assert page(f"{admin}/readyz")[0] == 200
        assert page(f"{admin}/state")[1]["engine"]["state"] == state


def test_a_switch_that_is_none_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_CHECK", "no")
    ended = failed_start("http://127.0.0.1:9", str(shipped_policies()))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "sidecar: SIDECAR_ENGINE_CHECK: 'no' is none of on, alive, off"


def test_the_dry_run_starts_before_another_engine_and_says_so(tmp_path: Path) -> None:
    with beside(tmp_path, "vllm", VLLM.replace("vllm", "sglang") + "mode: observe\n") as admin:
        status, ready = page(f"{admin}/readyz")
        assert status == 200
        assert any(
            "is vLLM (/v1/models says so), but the policy says engine: sglang" in one for one in ready["notices"]
        )
        headline = page(f"{admin}/overview")[1]["headline"]
        assert headline.startswith("Another engine than the policy's answers, for ")
        assert headline.endswith("No request is held (mode: observe).")


def mounted(policy: Path, owner: str) -> fastapi.FastAPI:
    """An app that says whose it is, or has no page that says so."""
    app = fastapi.FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=policy)
    if owner:
        app.get("/v1/models")(lambda: {"data": [{"id": "m", "owned_by": owner}]})
    return app


def test_a_mounted_middleware_knows_the_engine_of_its_app_where_that_says_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(VLLM)
    said = {owner: asyncio.run(start_failure(mounted(path, owner))) for owner in ("vllm", "sglang", "a-gateway", "")}
    assert "this app is SGLang (/v1/models says so), but the policy says" in str(said.pop("sglang"))
    assert said == {"vllm": None, "a-gateway": None, "": None}


# -- in a shared pool


def test_the_pages_of_a_shared_pool_say_which_replica_cannot_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun_store(tmp_path) as store, ExitStack() as stack:
        monkeypatch.setenv(STORE_VARIABLE, store.url)
        well = stack.enter_context(beside(tmp_path, "vllm", VLLM))
        cut_off = stack.enter_context(
            before(tmp_path / "cut-off.yaml", "http://127.0.0.1:9", VLLM + "max_choices: 3\n")
        )
        for admin in (well, cut_off):
            shown = until(f"{admin}/overview", lambda _, shown: len(shown["replicas"]) == 2)
            assert shown["lacks_engine"]
            assert shown["headline"].startswith("1 of 2 replicas cannot use the engine (")
            assert "): connection refused by http://127.0.0.1:9, for " in shown["headline"]
        assert (page(f"{well}/readyz")[0], page(f"{cut_off}/readyz")[0]) == (200, 503)
