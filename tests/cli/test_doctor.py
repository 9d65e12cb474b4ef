"""`sidecar doctor` as a user runs it, on a real emulator process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.cli import main

SIDECAR = (sys.executable, "-m", "sidecar.cli")


@contextmanager
def emulator(*arguments: str) -> Iterator[str]:
    command = [*SIDECAR, "emulate", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[0-9.:]+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.kill()


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SIDECAR, "doctor", *arguments], capture_output=True, text=True, check=False, timeout=60)


FAST: Sequence[str] = ("--max-num-seqs", "4", "--step-ms", "1")


def test_an_engine_that_follows_priority_is_a_zero(tmp_path: Path) -> None:
    figures = tmp_path / "doctor.json"
    with emulator("--engine", "tensorrt-llm", *FAST) as url:
        ended = doctor("--upstream", f"{url}/v1", "--json", str(figures))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"WORKS: tensorrt-llm 1.4.0rc1 at {url} serves what is important first\n\n  field")
    assert "will send bursts of short requests, the first of 40, none of more than 400, for answers" in ended.stderr
    assert "sending 40 requests at once by body field priority" in ended.stderr
    found = json.loads(figures.read_text())
    assert found["verdict"] == "works"
    assert [condition["state"] for condition in found["conditions"]] == ["works"] * 4
    mixed, control = found["bursts"]
    assert (mixed["effect"], control["effect"], control["way"]) == ("by priority", "none", None)
    assert mixed["correlation"]["low"] > 0.5
    assert len(mixed["requests_seen"]) == 40


def test_what_is_broken_is_a_one_and_standard_output_is_nothing_but_json() -> None:
    with emulator("--engine", "tensorrt-llm", "--no-priority-field", *FAST) as url:
        ended = doctor("--upstream", url, "--json", "-")
    assert ended.returncode == 1
    found = json.loads(ended.stdout)
    assert (found["verdict"], found["conditions"][0]["state"]) == ("broken", "broken")
    assert "extra_forbidden" in found["fields"][0]["refusal"]
    assert found["bursts"] == []


def test_what_could_not_be_seen_is_a_three() -> None:
    with emulator("--engine", "vllm", *FAST) as url:
        ended = doctor("--upstream", url, "--read-only")
    assert ended.returncode == 3
    assert ended.stdout.startswith(f"UNKNOWN: vllm 0.33.0 at {url}: nothing was sent\n")
    assert ended.stderr == ""


def test_a_policy_for_another_engine_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("engine: sglang\ncapacity: {requests: 4}\ntiers: {high: {}, normal: {}}\n")
    with emulator("--engine", "vllm", *FAST) as url:
        ended = doctor("--upstream", url, "--read-only", "--policy", str(path))
    assert ended.returncode == 1
    assert "the policy says `engine: sglang`, but vllm answers" in ended.stdout


def test_no_server_there_is_a_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--upstream", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("sidecar doctor: cannot reach http://127.0.0.1:9: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--upstream", "ftp://engine:8000"], "write one like http://127.0.0.1:8000"),
        (["--upstream", "http://e", "--requests", "0"], "write a number from 1 to 4096"),
        (["--upstream", "http://e", "--timeout", "soon"], "soon"),
        (["--upstream", "http://e", "--timeout", "1h"], "write one from 1s to 600s"),
        (["--upstream", "http://e", "--header", "x-team"], "write one like x-team: search"),
        ([], "--upstream"),
    ],
)
def test_a_wrong_command_line_says_what_would_be_right(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *arguments])
    assert said in capsys.readouterr().err


def test_a_policy_that_cannot_be_read_is_a_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--upstream", "http://127.0.0.1:9", "--policy", str(tmp_path / "none")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_found_out_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--upstream", "http://127.0.0.1:9", "--json", str(tmp_path / "no" / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_control_c_leaves_no_work_at_the_engine() -> None:
    with emulator("--engine", "vllm", "--max-num-seqs", "2", "--step-ms", "40") as url:
        command = [*SIDECAR, "doctor", "--upstream", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            _until(lambda: _waiting(url) > 20)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "Traceback" not in error
        _until(lambda: _waiting(url) == 0)


def _waiting(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
        text = page.read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_waiting{"))


def _until(condition: object) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("engine", "option", "arguments"),
    [
        ("vllm", "--enable-prompt-tokens-details", ()),
        ("sglang", "--enable-cache-report", ("--read-only",)),  # its pages say it, so that nothing has to be sent
    ],
)
def test_a_prefix_cache_whose_hits_are_not_reported_is_a_note(
    engine: str, option: str, arguments: Sequence[str]
) -> None:
    advice = re.compile(rf"prefix\s+cache,\s+but\s+its\s+answers.*{option}", re.DOTALL)
    for flags, is_said in (
        (["--enable-prefix-caching"], True),
        (["--enable-prefix-caching", option], False),
        ([], False),
    ):
        with emulator("--engine", engine, *FAST, *flags) as url:
            ended = doctor("--upstream", url, *arguments)
        assert bool(advice.search(ended.stdout)) is is_said, (flags, ended.stdout)
