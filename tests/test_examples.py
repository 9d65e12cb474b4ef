"""Every example runs as its README says: its own command line, a real server, a real request."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sidecar
from sidecar.cli import main
from sidecar.policy.compiler import load
from tests.examples.command_lines import named_files, shell_lines
from tests.support.each import each
from tests.support.http import Fetched, fetch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
HOW_IT_WORKS = ROOT / "docs" / "how-it-works.md"
SHELL_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
HELLO = [{"role": "user", "content": "hello"}]


def environment() -> dict[str, str]:
    """With this Python's commands first, and nothing of ours set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR_")}
    return {**kept, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def blocks(example: str) -> list[str]:
    """The shell blocks of its README."""
    return SHELL_BLOCK.findall((EXAMPLES / example / "README.md").read_text())


def ask(url: str, path: str, body: Mapping[str, Any], key: str | None, **headers: str) -> Fetched:
    return fetch(url + path, body, key=key, **headers)


def documented(example: str) -> str:
    """The one command line in its README that starts it on port 8000."""
    (line,) = (line for block in blocks(example) for line in block.splitlines() if line.endswith("--port 8000"))
    return line


@contextmanager
def running(example: str, **settings: str) -> Iterator[str]:
    """Runs the README's command line, but for the port and with settings; gives the server's address and ends it."""
    words = shlex.split(documented(example).replace("--port 8000", "--port 0"))
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    with subprocess.Popen(
        [word for word in words if word.partition("=")[0] not in variables],
        cwd=ROOT,
        env=environment() | variables | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield address(process)
        finally:
            process.kill()


def address(process: subprocess.Popen[str]) -> str:
    """Where uvicorn says that it listens. Fails with all that it said instead."""
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"Uvicorn running on (http://127\.0\.0\.1:\d+)", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found[1]
    raise AssertionError("".join(said))


@each("page", sorted(EXAMPLES.glob("*/README.md")), ids=str)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = [path for line in shell_lines(page) for path in named_files(re.sub(r"--[-a-z]+=", "", line))]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.long
def test_mounted_into_fastapi() -> None:
    with running("fastapi_app") as url:
        body = {"model": "m", "max_tokens": 5, "messages": HELLO}
        answer = ask(url, "/v1/chat/completions", body, "sk-demo-standard", x_priority="critical")
        assert answer.status == 200
        assert answer.headers["x-admission-tier"] == "high"
        assert answer.headers["x-admission-clamped-from"] == "critical"
        text = answer.json["choices"][0]["message"]["content"]
        assert text == "tier high, tenant standard, engine priority 0.75"
        assert ask(url, "/v1/chat/completions", body, "sk-nobody").json["error"]["code"] == "invalid_api_key"
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as unguarded:
            assert unguarded.headers["x-admission-tier"] is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "said"), [("observe", "not granted"), ("enforce", "tier normal, tenant anonymous, engine priority 10")]
)
def test_mounted_into_fastapi_with_the_policy_that_init_writes(tmp_path: Path, mode: str, said: str) -> None:
    assert main(["init", str(tmp_path / "policies"), "--requests", "8", "--anonymous", "normal"]) == 0
    policy = tmp_path / "policies" / "policy.yaml"
    policy.write_text(policy.read_text().replace("mode: observe", f"mode: {mode}"))
    with running("fastapi_app", SIDECAR_POLICY=str(policy)) as url:
        answer = ask(url, "/v1/chat/completions", {"model": "m", "max_tokens": 5, "messages": HELLO}, None)
    assert answer.json["choices"][0]["message"]["content"] == said


@pytest.mark.long
@pytest.mark.skipif("tensorrt_llm" in sys.modules, reason="with the real engine it loads a model")
def test_an_engine_in_the_same_process_can_read_what_was_granted() -> None:
    with running("in_process_engine") as url:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 16}
        for key, priority in (("sk-demo-interactive", "0.75"), ("sk-demo-standard", "0.5"), ("sk-demo-research", "0")):
            answer = ask(url, "/v1/completions", body, key)
            assert answer.json["choices"][0]["text"] == f"served at priority {priority} : hello "
        streamed = ask(url, "/v1/completions", {**body, "stream": True}, "sk-demo-research").body.decode()
        events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "served at priority 0 : hello "


def test_the_stand_in_refuses_what_the_engine_refuses() -> None:
    from examples.in_process_engine.stand_in import StandInLLM

    with pytest.raises(ValueError, match="priority"):
        StandInLLM("m").generate_async("hello", priority=1.5)


@pytest.mark.long
def test_a_server_that_is_given_a_name_constructs_it_from_the_environment() -> None:
    with running("from_environment") as url:
        body = {"model": "m", "max_tokens": 5, "messages": HELLO}
        answer = ask(url, "/v1/chat/completions", body, "sk-demo-interactive")
        assert (answer.status, answer.headers["x-admission-tier"]) == (200, "high")
        assert ask(url, "/v1/chat/completions", body, "sk-nobody").status == 401


@pytest.mark.long
def test_without_a_policy_in_the_environment_it_does_not_start_and_says_why() -> None:
    words = shlex.split(documented("from_environment").replace("--port 8000", "--port 0"))[1:]
    ended = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "set SIDECAR_POLICY" in ended.stderr


def test_the_middleware_is_found_by_name_as_vllm_finds_it() -> None:
    given = "sidecar.AdmissionMiddleware"
    module, name = given.rsplit(".", 1)
    found = getattr(importlib.import_module(module), name)
    assert inspect.isclass(found)
    assert found is sidecar.AdmissionMiddleware
    assert name in sidecar.__all__


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="its requests are sent with curl")
def test_the_reverse_proxy_script_shows_three_requests_and_leaves_nothing_running() -> None:
    assert blocks("reverse_proxy")[0].strip() == "sh examples/reverse_proxy/run.sh"
    ended = subprocess.run(
        ["sh", "examples/reverse_proxy/run.sh"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("HTTP")] == ["HTTP/1.1 200 OK"] * 2 + [
        "HTTP/1.1 401 Unauthorized"
    ]
    assert [line for line in lines if line.startswith("x-admission-tier")] == [
        "x-admission-tier: high",
        "x-admission-tier: batch",
    ]
    assert "x-admission-clamped-from: high" in lines
    for port in re.findall(r"http://127\.0\.0\.1:(\d+)", lines[0]):
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)


def test_every_example_is_in_the_list_and_has_a_readme() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith("__")}
    listed = set(re.findall(r"\]\(([\w-]+)/\)", (EXAMPLES / "README.md").read_text()))
    assert listed == folders
    assert all((EXAMPLES / folder / "README.md").is_file() for folder in folders)


def test_the_worked_example_is_what_the_page_says() -> None:
    command = blocks("worked_example")[0].split()
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert f"```\n{ended.stdout}```" in HOW_IT_WORKS.read_text()


def test_the_limits_in_the_shipped_tenants_file_load_when_they_are_wanted(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "policies", tmp_path / "policies")
    standard = tmp_path / "policies" / "tenants" / "standard.yaml"
    before, heading, after = standard.read_text().partition("# limits:")
    standard.write_text(before + "\n".join(line.removeprefix("# ") for line in (heading + after).splitlines()))
    named = load(tmp_path / "policies" / "policy.yaml").named
    (tenant,) = (tenant for tenant in named.values() if tenant.limits.are_counted)
    assert (tenant.name, tenant.limits.tokens_per_minute, tenant.downgrade_level) == ("standard", 2_000_000, 4)
