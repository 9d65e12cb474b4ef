"""`sidecar doctor` as a user runs it, on an emulated engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import fetch
from tests.support.in_process import complaint, emulated_engine, ran
from tests.support.redis_servers import until

SIDECAR = (sys.executable, "-m", "sidecar.cli")


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran("doctor", *arguments)


FAST: Sequence[str] = ("--max-num-seqs", "4", "--step-ms", "1")


@pytest.mark.long
def test_an_engine_that_follows_priority_is_a_zero(tmp_path: Path) -> None:
    figures = tmp_path / "doctor.json"
    with emulated_engine("--engine", "tensorrt-llm", *FAST) as url:
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


@pytest.mark.long
def test_what_is_broken_is_a_one_and_standard_output_is_nothing_but_json() -> None:
    with emulated_engine("--engine", "tensorrt-llm", "--no-priority-field", *FAST) as url:
        ended = doctor("--upstream", url, "--json", "-")
    assert ended.returncode == 1
    found = json.loads(ended.stdout)
    assert (found["verdict"], found["conditions"][0]["state"]) == ("broken", "broken")
    assert "extra_forbidden" in found["fields"][0]["refusal"]
    assert found["bursts"] == []


def test_no_server_there_is_a_two() -> None:
    assert complaint("doctor", "--upstream", "http://127.0.0.1:9", code=2).startswith(
        "sidecar doctor: cannot reach http://127.0.0.1:9: "
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--upstream", "ftp://engine:8000"], "write one like http://127.0.0.1:8000"),
        (["--upstream", "http://e", "--requests", "0"], "write a number from 1 to 4,096"),
        (["--upstream", "http://e", "--timeout", "soon"], "soon"),
        (["--upstream", "http://e", "--timeout", "1h"], "write one from 1s to 600s"),
        (["--upstream", "http://e", "--header", "x-team"], "write one like x-team: search"),
        (["--upstream", "http://e", "--upstream", "http://f"], "--upstream is given twice; several engines belong in"),
        ([], "--upstream"),
    ],
)
def test_a_wrong_command_line_says_what_would_be_right(arguments: list[str], said: str) -> None:
    assert said in complaint("doctor", *arguments, code=2)


def test_a_policy_that_cannot_be_read_is_a_two(tmp_path: Path) -> None:
    assert "there is no such file" in complaint(
        "doctor", "--upstream", "http://127.0.0.1:9", "--policy", tmp_path / "none", code=2
    )


@pytest.mark.long
def test_control_c_leaves_no_work_at_the_engine() -> None:
    with emulated_engine("--engine", "vllm", "--max-num-seqs", "2", "--step-ms", "40") as url:
        command = [*SIDECAR, "doctor", "--upstream", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            until(lambda: _waiting(url) > 20, "twenty wait")
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "Traceback" not in error
        until(lambda: _waiting(url) == 0, "none waits")


def _waiting(url: str) -> float:
    return fetch(f"{url}/metrics").total("vllm:num_requests_waiting")


@pytest.mark.long
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
        with emulated_engine("--engine", engine, *FAST, *flags) as url:
            ended = doctor("--upstream", url, *arguments)
        assert bool(advice.search(ended.stdout)) is is_said, (flags, ended.stdout)


FLEET = """\
engine: vllm
tiers: {{high: {{}}, normal: {{}}}}
engines:
  static:
    - {{name: one, url: {one}}}
    - {{name: two, url: {two}, capacity: {{requests: 9}}}}
"""


@pytest.mark.long
def test_each_engine_of_a_policy_is_examined(tmp_path: Path) -> None:
    path, figures = tmp_path / "policy.yaml", tmp_path / "doctor.json"
    with emulated_engine("--engine", "vllm", *FAST) as one, emulated_engine("--engine", "sglang", *FAST) as two:
        path.write_text(FLEET.format(one=one, two=two))
        ended = doctor("--policy", str(path), "--read-only", "--json", str(figures))
        alone = doctor("--policy", str(path), "--read-only", "--upstream", one)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"engine one\nUNKNOWN: vllm 0.33.0 at {one}: nothing was sent\n")
    assert "\n\nengine two\nBROKEN: sglang " in ended.stdout
    assert "the policy says `engine: vllm`, but sglang answers" in ended.stdout
    assert ended.stdout.endswith("\nengines: one unknown, two broken\n")
    found = json.loads(figures.read_text())["engines"]
    assert [(each["name"], each["verdict"], each["upstream"]) for each in found] == [
        ("one", "unknown", one),
        ("two", "broken", two),
    ]
    assert alone.returncode == 3
    assert alone.stdout.startswith("UNKNOWN: vllm")


@pytest.mark.long
def test_an_engine_is_compared_with_its_own_capacity(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with emulated_engine("--engine", "sglang", *FAST) as one, emulated_engine("--engine", "sglang", *FAST) as two:
        path.write_text(FLEET.format(one=one, two=two).replace("vllm", "sglang"))
        ended = doctor("--policy", str(path), "--read-only")
        of_two = doctor("--policy", str(path), "--read-only", "--upstream", two)
    first, _, second = ended.stdout.partition("\nengine two\n")
    said = "capacity.requests is 9, but the engine runs 4 at once"
    assert (said in first, said in second, said in of_two.stdout) == (False, True, True)


@pytest.mark.long
def test_the_engines_that_are_there_are_examined_where_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with emulated_engine("--engine", "vllm", *FAST) as two:
        path.write_text(FLEET.format(one="http://127.0.0.1:9", two=two))
        ended = doctor("--policy", str(path), "--read-only", "--json", "-")
    assert ended.returncode == 2
    assert "sidecar doctor: engine one: cannot reach http://127.0.0.1:9: " in ended.stderr
    one, second = json.loads(ended.stdout)["engines"]
    assert (one["name"], one["verdict"], second["verdict"]) == ("one", None, "unknown")
    assert one["error"].startswith("cannot reach")


def test_the_engines_of_a_list_are_examined(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(FLEET.partition("  static:")[0].format() + "  file: e.yaml\n")
    with emulated_engine("--engine", "vllm", *FAST) as one:
        (tmp_path / "e.yaml").write_text(f"engines: [{{name: x, url: {one}}}]\n")
        ended = doctor("--policy", str(path), "--read-only")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, "engines: x unknown")


def test_the_engines_that_dns_names_are_examined(tmp_path: Path) -> None:
    with emulated_engine("--engine", "vllm", *FAST) as url:
        port = url.rpartition(":")[2]
        text = FLEET.partition("  static:")[0].format() + f"  dns: {{name: 'localhost:{port}'}}\n"
        (tmp_path / "policy.yaml").write_text(text)
        ended = doctor("--policy", str(tmp_path), "--read-only")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, f"engines: 127.0.0.1:{port} unknown")


def together(folder: Path, policy: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the report of the engines together in one line, and the same as figures."""
    (folder / "policy.yaml").write_text(policy)
    ended = doctor("--policy", str(folder), "--json", str(folder / "d.json"), *arguments)
    _, _, text = ended.stdout.partition("\nengines together\n")
    return ended.returncode, " ".join(text.split()), json.loads((folder / "d.json").read_text())["together"]


@pytest.mark.long
def test_engines_that_fit_together_are_a_zero_and_their_capacity_is_one_line(tmp_path: Path) -> None:
    cached = ("--enable-prefix-caching", "--cache-report", "--kv-tokens", "50000")
    with (
        emulated_engine("--engine", "vllm", *FAST, *cached) as one,
        emulated_engine("--engine", "vllm", *FAST, *cached) as two,
    ):
        policy = FLEET.format(one=one, two=two).replace(", capacity: {requests: 9}", "")
        code, text, found = together(tmp_path, policy)
    assert (code, found["findings"]) == (0, [])
    assert [row["cached_tokens_reported"] for row in found["rows"]] == [True, True]
    assert [(row["name"], row["verdict"], row["tokens"]) for row in found["rows"]] == [
        ("one", "works", 47_500),
        ("two", "works", 47_500),
    ]
    assert "one works emulated 47,500 unbounded on reported two works" in text
    line = "capacity: {from: engine, fraction: 95%, waiting: 2, requests: 6}"
    assert f"capacity of each, for `engines` of the policy {line} engines: one works, two works" in text
    assert found["capacity"]["yaml"] == line


@pytest.mark.long
def test_engines_of_several_models_belong_in_pools_of_their_own(tmp_path: Path) -> None:
    with (
        emulated_engine("--engine", "vllm", *FAST, "--model", "llama") as one,
        emulated_engine("--engine", "vllm", *FAST, "--model", "qwen", "--context-tokens", "1000") as two,
    ):
        policy = FLEET.format(one=one, two=two)
        code, text, _ = together(tmp_path, policy, "--read-only")
        assert code == 1
        assert "the engines of one pool serve no model in common: one llama; two qwen: write `models:`" in text
        assert "differ in the longest request that they take: one 131,072 tokens, two 1,000 tokens" in text
        pools = "models: {llama: {engines: [one]}, qwen: {engines: [two], aliases: [my-lora]}}\n"
        code, text, found = together(tmp_path, policy + pools, "--read-only")
    assert code == 1
    assert [one["is_broken"] for one in found["findings"]] == [True, False], "the second: no prefix caches"
    assert "the engine two is in the pool of qwen, and does not serve my-lora: it lists qwen" in text


@pytest.mark.long
def test_an_engine_without_a_prefix_cache_is_named_where_requests_are_drawn_by_it(tmp_path: Path) -> None:
    cached = ("--enable-prefix-caching",)
    with emulated_engine("--engine", "vllm", *FAST, *cached) as one, emulated_engine("--engine", "vllm", *FAST) as two:
        policy = FLEET.format(one=one, two=two)
        code, text, _ = together(tmp_path, policy, "--read-only")
        assert code == 3
        assert "two have no prefix cache: requests are drawn to them in vain" in text
        without = policy + "  affinity: {prefix: false}\n"
        _, text, found = together(tmp_path, without, "--read-only")
    assert found["findings"] == []


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ("capacity: {tokens: 5}", "give --upstream URL, or --policy with a policy that names its engines"),
        (
            "engines: {dns: {name: 'v.invalid:8000'}}",
            "DNS for v.invalid:8000: Name or service not known; run it where the sidecar runs, or give --upstream URL "
            "of an engine",
        ),
        ("engines: {file: e.yaml}", "the engine list is empty: give --upstream URL of an engine"),
    ],
)
def test_without_an_address_it_says_what_to_give(tmp_path: Path, engines: str, said: str) -> None:
    (tmp_path / "e.yaml").write_text("engines: []\n")
    (tmp_path / "policy.yaml").write_text(f"engine: vllm\ntiers: {{normal: {{}}}}\n{engines}\n")
    assert complaint("doctor", "--policy", tmp_path, code=2) == f"sidecar doctor: {said}\n"
