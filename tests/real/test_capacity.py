"""`capacity: {from: engine}` on real engines: mounted into vLLM, behind a network, and before Dynamo."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.proxy.proxy import ReverseProxy
from tests.real.lab import dynamo, vllm
from tests.support.redis_servers import free_port
from tests.support.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

VLLM_TOKENS = 524_288  # 4,096 blocks of 128: one GiB for the lab's model


def policy(folder: Path, engine: str, capacity: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(f"engine: {engine}\ncapacity: {capacity}\ntiers: {{normal: {{}}}}\nanonymous: normal\n")
    return path


def pool_of(state: Any) -> Any:
    return state["pool"]["capacity"]


def test_mounted_into_vllm_it_knows_tokens_and_sequences(tmp_path: Path) -> None:
    port = free_port()
    variables = {
        "SIDECAR_POLICY": str(policy(tmp_path, "vllm", "{from: engine}")),
        "SIDECAR_ADMIN_PORT": str(port),
    }
    with (
        vllm(middleware=["sidecar.AdmissionMiddleware"], variables=variables, sequences=4),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=5) as answer,
    ):
        state = json.load(answer)
    assert pool_of(state) == {"tokens": VLLM_TOKENS * 95 // 100, "requests": 4 + 2}
    assert state["pool"]["engine"]["trouble"] is None


async def test_behind_a_network_vllm_tells_its_tokens_alone(tmp_path: Path) -> None:
    path = policy(tmp_path, "vllm", "{from: engine, fraction: 50%, requests: 7}")
    with vllm() as engine:
        sidecar = AdmissionMiddleware(ReverseProxy(engine.url), path)
        async with serving(sidecar):
            assert pool_of(sidecar.controller.state()) == {"tokens": VLLM_TOKENS // 2, "requests": 7}


async def test_dynamos_frontend_tells_what_its_workers_hold(tmp_path: Path) -> None:
    path = policy(tmp_path, "dynamo", "{from: engine, fraction: 100%}")
    with dynamo(sequences=4) as url:
        sidecar = AdmissionMiddleware(ReverseProxy(url), path)
        async with serving(sidecar):
            assert pool_of(sidecar.controller.state()) == {"tokens": 16_384, "requests": 4 + 2}
