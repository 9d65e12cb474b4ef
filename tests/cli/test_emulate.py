"""`sidecar emulate` as a user runs it."""

from __future__ import annotations

import re
import signal

from tests.support.commands import command
from tests.support.http import fetch
from tests.support.in_process import complaint

SUMMARY = re.compile(
    r"emulated dynamo on (http://127\.0\.0\.1:\d+), model emulated, priority scheduling, "
    r"3 sequences at once, 20 ms per step\n"
)


def test_it_says_what_runs_where_and_serves_there_until_it_is_asked_to_stop() -> None:
    with command("emulate", "--engine", "dynamo", "--port", "0", "--max-num-seqs", "3") as process:
        found = SUMMARY.fullmatch(process.stdout.readline())
        assert found
        assert fetch(f"{found[1]}/v1/models").json["data"][0]["owned_by"] == "nvidia"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (0, -signal.SIGTERM)


def test_figures_that_no_engine_could_run_with_are_said_so() -> None:
    assert "max_num_seqs" in complaint("emulate", "--engine", "vllm", "--max-num-seqs", "0", code=2)
