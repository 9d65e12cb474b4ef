"""The engine watch in `sidecar serve` and in a mounted app: another engine, none, a new one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.policy.compiler import shipped_policies
from tests.cluster.replicas import Replica, address, started
from tests.support.in_process import emulated_engine, ran, served_sidecar, start_failure
from tests.support.late import fastapi
from tests.support.redis_servers import RedisServer, first_binary, free_port

VLLM = """\
engine: vllm
capacity: {tokens: 100k, requests: 8}
tiers: {high: {reserve: 10%}, batch: {reserve: 10%}}
default_tier: batch
anonymous: high
sources: [header, key]
"""


@contextmanager
def engine(folder: Path, kind: str, port: int) -> Iterator[str]:
    """`sidecar emulate`, killed at the end of the block."""
    log = folder / f"engine-{kind}-{time.monotonic_ns()}"
    with started(log, "emulate", "--engine", kind, "--port", str(port)) as process:
        yield address(process, log)


@contextmanager
def sidecar(folder: Path, upstream: str, policy: str = VLLM, **environment: str) -> Iterator[Replica]:
    """`sidecar serve`, whose log is `sidecar.log`."""
    path = folder / "policy.yaml"
    path.write_text(policy)
    log = folder / f"sidecar-{time.monotonic_ns()}.log"
    served = ("serve", "--upstream", upstream, "--policy", str(path), "--port", "0", "--admin-port", "0")
    with started(log, *served, **environment) as process:
        yield Replica(process, address(process, log), address(process, log))


def page(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def until(url: str, is_so: Callable[[int, Any], bool], within_s: float = 60.0) -> Any:
    """The page, when it is so."""
    ends_s = time.monotonic() + within_s
    while not is_so(*(found := page(url))):
        assert time.monotonic() < ends_s, found
        time.sleep(0.05)
    return found[1]


def logged(folder: Path) -> list[str]:
    """The events in the sidecars' logs."""
    lines = [line for log in sorted(folder.glob("sidecar-*.log")) for line in log.read_text().splitlines()]
    return [json.loads(line)["event"] for line in lines if line.startswith("{")]


def failed_start(upstream: str, policy: str) -> subprocess.CompletedProcess[str]:
    return ran("serve", "--upstream", upstream, "--policy", policy, "--port", "0", "--admin-port", "0")


@contextmanager
def beside(folder: Path, kind: str, policy: str) -> Iterator[str]:
    """An emulated engine and a sidecar before it, both in threads of this process: the sidecar's admin port."""
    path = folder / "policy.yaml"
    path.write_text(policy)
    with emulated_engine("--engine", kind) as upstream, served_sidecar(path, upstream) as (_, admin):
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


# -- later


@pytest.mark.long
def test_another_engine_that_comes_later_is_not_used_and_the_right_one_is(tmp_path: Path) -> None:
    port = free_port()
    with sidecar(tmp_path, f"http://127.0.0.1:{port}") as replica:
        status, ready = page(f"{replica.admin_url}/readyz")
        assert (status, ready["reasons"]) == (
            503,
            [f"the engine does not answer: connection refused by http://127.0.0.1:{port}"],
        )
        with engine(tmp_path, "sglang", port):
            ready = until(f"{replica.admin_url}/readyz", lambda _, ready: "SGLang" in str(ready["reasons"]))
            assert "write engine: sglang, or give --upstream the address of a vLLM" in ready["reasons"][0]
            shown = page(f"{replica.admin_url}/overview")[1]
            assert shown["lacks_engine"]
            assert shown["headline"].endswith("No request waits.")
            assert page(f"{replica.admin_url}/state")[1]["engine"]["state"] == "mismatch"
        until(f"{replica.admin_url}/readyz", lambda _, ready: "connection refused" in str(ready["reasons"]))
        with engine(tmp_path, "vllm", port):
            until(f"{replica.admin_url}/readyz", lambda status, _: status == 200)
            assert not page(f"{replica.admin_url}/overview")[1]["lacks_engine"]
    assert [event for event in logged(tmp_path) if event.startswith("engine_")] == [
        "engine_down",
        "engine_mismatch",
        "engine_down",
        "engine_up",
    ]


@pytest.mark.long
def test_an_engine_that_is_killed_is_known_by_the_next_request_and_its_return_within_a_second(tmp_path: Path) -> None:
    port = free_port()
    with sidecar(tmp_path, f"http://127.0.0.1:{port}") as replica:
        with engine(tmp_path, "vllm", port):
            until(f"{replica.admin_url}/readyz", lambda status, _: status == 200)
            assert "admission_engine_up" in (metrics := _metrics(replica))
            assert metrics["admission_engine_up"] == 1.0
        page(f"{replica.url}/v1/models")
        shown = until(f"{replica.admin_url}/overview", lambda _, shown: shown["lacks_engine"], within_s=2)
        said = f"The engine does not answer: connection refused by http://127.0.0.1:{port}, for "
        assert shown["headline"].startswith(said)
        assert shown["notices"] == []
        time.sleep(1)  # the gauges are read at most once a second
        assert _metrics(replica)["admission_engine_up"] == 0.0
        with engine(tmp_path, "vllm", port):
            until(f"{replica.admin_url}/readyz", lambda status, _: status == 200, within_s=3)


def _metrics(replica: Replica) -> dict[str, float]:
    with urllib.request.urlopen(f"{replica.admin_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("admission_engine")}


@pytest.mark.long
@pytest.mark.skipif(first_binary() is None, reason="no redis-server or valkey-server")
def test_the_pages_of_a_shared_pool_say_which_replica_cannot_reach_the_engine(tmp_path: Path) -> None:
    binary = first_binary()
    assert binary is not None
    with ExitStack() as stack:
        store = stack.enter_context(RedisServer(binary, tmp_path))
        upstream = stack.enter_context(engine(tmp_path, "vllm", 0))
        well = stack.enter_context(sidecar(tmp_path, upstream, SIDECAR_STORE=store.url))
        cut_off = stack.enter_context(sidecar(tmp_path, "http://127.0.0.1:9", SIDECAR_STORE=store.url))
        for replica in (well, cut_off):
            shown = until(f"{replica.admin_url}/overview", lambda _, shown: len(shown["replicas"]) == 2)
            assert shown["lacks_engine"]
            assert shown["headline"].startswith("1 of 2 replicas cannot use the engine (")
            assert "): connection refused by http://127.0.0.1:9, for " in shown["headline"]
        assert page(f"{well.admin_url}/readyz")[0] == 200
        assert page(f"{cut_off.admin_url}/readyz")[0] == 503
