"""`sidecar emulate` as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

from tests.support.in_process import complaint

SUMMARY = re.compile(
    r"emulated dynamo on (http://127\.0\.0\.1:\d+), model emulated, priority scheduling, "
    r"3 sequences at once, 20 ms per step\n"
)


def test_it_says_what_runs_where_and_serves_there_until_it_is_asked_to_stop() -> None:
    command = [
        sys.executable,
        "-m",
        "sidecar.cli",
        "emulate",
        "--engine",
        "dynamo",
        "--port",
        "0",
        "--max-num-seqs",
        "3",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = SUMMARY.fullmatch(process.stdout.readline())
            assert found
            with urllib.request.urlopen(f"{found[1]}/v1/models", timeout=10) as response:
                assert json.load(response)["data"][0]["owned_by"] == "nvidia"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) in (0, -signal.SIGTERM)
        finally:
            process.kill()


def test_figures_that_no_engine_could_run_with_are_said_so() -> None:
    assert "max_num_seqs" in complaint("emulate", "--engine", "vllm", "--max-num-seqs", "0", code=2)
