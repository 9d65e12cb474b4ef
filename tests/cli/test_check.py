from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli import main

POLICIES = Path(__file__).parents[2] / "policies"


def _broken(folder: Path) -> Path:
    path = folder / "policy.yaml"
    path.write_text("engine: vllm\ncapacity: {tokens: 5}\ntiers: {normal: {reserve: 20}}\n")
    return path


def test_a_good_policy_prints_a_table_and_its_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(POLICIES)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "high      80,000 / 32  40,000 / 16  400,000 / 160  280,000 / 112  120,000 / 48\n" in printed.out
    assert "certain size: what finds room in a bounded time, even while critical holds its limit" in printed.out
    assert "standard: normal, may ask for high; 1 key, weight 1" in printed.out
    assert "tiers.critical.lend: lends nothing: while it is idle, 40,000 tokens (10% of the pool)" in printed.out


def test_a_bad_policy_prints_every_mistake_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _broken(tmp_path)
    assert main(["check", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f'{path}:3: tiers.normal.reserve: "20" is not a share; write "20%"\n\n1 mistake; the policy cannot be used\n'
    )


def test_json_on_standard_output_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(POLICIES), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert result["tiers"][0] == {
        "tier": "critical",
        "reserve": {"tokens": 40_000, "requests": 16},
        "headroom": {"tokens": 40_000, "requests": 16},
        "limit": {"tokens": 200_000, "requests": 80},
        "largest_request": {"tokens": 200_000, "requests": 80},
        "largest_certain_request": {"tokens": 200_000, "requests": 80},
    }
    assert [warning["path"] for warning in result["warnings"]] == ["tiers.critical.lend", "tiers.low", "tiers.batch"]


def test_the_json_of_a_bad_policy_lists_its_mistakes(tmp_path: Path) -> None:
    path, result = _broken(tmp_path), tmp_path / "result.json"
    assert main(["check", str(path), "--json", str(result)]) == 1
    message = '"20" is not a share; write "20%"'
    error = {"file": str(path), "line": 3, "path": "tiers.normal.reserve", "message": message}
    assert json.loads(result.read_text()) == {"ok": False, "errors": [error]}


def test_a_json_file_that_cannot_be_written_fails_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(POLICIES), "--json", str(tmp_path / "no" / "folder.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_path_with_nothing_there_says_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nothing")]) == 1
    assert "there is no such file; a policy is a file, or a folder with policy.yaml in it" in capsys.readouterr().err


def test_a_dimension_without_a_bound_is_shown_as_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("engine: none\ncapacity: {tokens: 5k}\ntiers: {normal: {}}\nanonymous: normal\n")
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "capacity 5,000 tokens\n" in printed
    assert "5,000 / any  5,000 / any         0 / 0\n" in printed  # without a reserve nothing is certain
    assert printed.endswith("no warnings\n")


def test_a_pool_whose_size_the_engine_tells_is_shown_in_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "engine: sglang\ncapacity: {from: engine, fraction: 90%}\nanonymous: normal\nsources: [header, key]\n"
        "tiers: {high: {reserve: 20%, lend: 50%}, normal: {reserve: 10%, limit: 60%}}\n"
    )
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "capacity what the engine holds, 90% of its tokens, and 2 requests that wait in it" in printed
    assert "high        20%        10%   100%         90%           90%\n" in printed
    assert "normal      10%         0%    60%         60%           60%\n" in printed
    assert "no warnings" in printed
    assert main(["check", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == {"tokens": None, "requests": None, "from": "engine"}
    path.write_text(path.read_text().replace("{from: engine", "{from: engine, tokens: 10k"))
    assert main(["check", str(path)]) == 0
    assert "capacity 10,000 tokens, and otherwise what the engine holds, 90% of its tokens" in capsys.readouterr().out


def test_whoever_reads_no_further_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "sidecar.cli", "check", str(POLICIES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(20)) == (b"", 128 + signal.SIGPIPE)
