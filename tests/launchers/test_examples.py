"""The scripts of `examples/` for the real servers, run as their READMEs say, with stand-ins in the servers' place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli import main
from tests.launchers.launched import environment, launched
from tests.support.each import each
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = {"MODEL": "m"}


def path_with(folder: Path) -> dict[str, str]:
    """This Python's commands first, then those in `folder`."""
    return {"PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])}


@each("example", ["tensorrt-llm", "vllm", "sglang"])
def test_the_policy_is_a_good_one_and_the_readme_runs_the_script(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(EXAMPLES / example / "policy.yaml")]) == 0
    readme = (EXAMPLES / example / "README.md").read_text()
    assert f"sh examples/{example}/serve.sh" in readme
    assert f"--policy examples/{example}/policy.yaml" in readme


@each("example", ["tensorrt-llm", "vllm", "sglang"])
def test_without_a_model_the_script_says_what_to_set(example: str) -> None:
    script = ["sh", str(EXAMPLES / example / "serve.sh")]
    ended = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=10, check=False)
    assert ended.returncode != 0
    assert "set MODEL to" in ended.stderr


@pytest.mark.long
async def test_trtllm_serves_with_the_examples_options_and_hears_priorities(tmp_path: Path) -> None:
    """The stand-in takes no option that TensorRT-LLM's arguments do not have."""
    admin = str(free_port())
    variables = {**MODEL, **path_with(tmp_path), "SIDECAR_ADMIN_PORT": admin}
    script = ["sh", str(EXAMPLES / "tensorrt-llm" / "serve.sh")]
    async with launched(script, variables=variables) as server:
        keys = {"authorization": "Bearer sk-demo-interactive"}
        body = {"model": "m", "input": "hello", "max_output_tokens": 2}
        async with server.client.post(f"{server.url}/v1/responses", json=body, headers=keys) as answer:
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, "high")
        assert (await server.get("/stand_in"))["served"] == [{"prompt": "hello", "priority": 0.75}]
        async with server.client.get(f"http://127.0.0.1:{admin}/state") as state:
            assert (await state.json())["pool"]["capacity"] == {"tokens": 1_310_000, "requests": 160}


@pytest.mark.long
async def test_sglang_serves_with_priority_scheduling(tmp_path: Path) -> None:
    variables = {
        **MODEL,
        **path_with(tmp_path),
        "SIDECAR_ADMIN_PORT": "0",
        "STAND_IN_SGLANG_LOG": str(tmp_path / "sglang.log"),
    }
    async with launched(["sh", str(EXAMPLES / "sglang" / "serve.sh")], variables=variables) as server:
        messages = [{"role": "user", "content": "hello"}]
        status, headers, _ = await server.post("/v1/chat/completions", "high", messages=messages)
        assert (status, headers["x-admission-tier"]) == (200, "normal")
        assert headers["x-admission-clamped-from"] == "high", "nobody knows who asks"
        assert '"priority": 2' in (tmp_path / "sglang.log").read_text()


def test_vllm_is_given_the_middleware_by_its_name(tmp_path: Path) -> None:
    """Its real server is tested in tests/real; here, what the script would run."""
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$SIDECAR_POLICY $SIDECAR_ADMIN_PORT" "$@"\n')
    program.chmod(0o755)
    script = ["sh", str(EXAMPLES / "vllm" / "serve.sh"), "--port", "8001"]
    variables = environment(**MODEL, **path_with(tmp_path))
    said = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=10, check=True).stdout
    policy, port, *line = said.split()
    assert Path(policy) == EXAMPLES / "vllm" / "policy.yaml"
    assert (port, line[:2], line[-2:]) == ("9464", ["serve", "m"], ["--port", "8001"])
    assert re.search(r"--scheduling-policy priority --middleware sidecar\.AdmissionMiddleware", said)
