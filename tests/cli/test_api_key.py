"""Keys of commands: from a file or the environment, where no other user of the machine sees them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.policy.compiler import shipped_policies
from tests.support.in_process import complaint, emulated_engine, ran, served_sidecar
from tests.support.pages import serving_pages

KEY, OTHER = "sk-demo-interactive", "sk-demo-research"
POLICIES = str(shipped_policies())


@pytest.fixture(scope="module")
def sidecar() -> Iterator[str]:
    """A sidecar that knows the demo keys, in front of an emulated engine."""
    with (
        emulated_engine("--engine", "tensorrt-llm", "--step-ms", "1") as engine,
        served_sidecar(shipped_policies(), engine) as (url, _),
    ):
        yield url


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SIDECAR_")]:
        monkeypatch.delenv(name)


def _ran(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        return ran(*arguments)


def _ways(folder: Path, prefix: str = "--") -> list[tuple[list[str], dict[str, str]]]:
    """Every way to give the key but the visible one."""
    file = folder / "key.txt"
    file.write_text(f"{KEY}\n")
    return [
        ([f"{prefix}key-file", str(file)], {}),
        ([], {"SIDECAR_API_KEY": KEY}),
        ([], {"SIDECAR_API_KEY_FILE": str(file)}),
        ([f"{prefix}key-file", str(file)], {"SIDECAR_API_KEY": OTHER}),  # the command line goes first
    ]


def test_explain_takes_the_key_from_a_file_or_the_environment(tmp_path: Path) -> None:
    for arguments, variables in _ways(tmp_path):
        ran = _ran("explain", POLICIES, "--path", "/v1/chat/completions", *arguments, "--json", "-", **variables)
        tenant = json.loads(ran.stdout)["tenant"]
        origin = "" if arguments else ", from SIDECAR_API_KEY"
        assert (tenant["name"], tenant["by"]) == ("interactive", f"its API key{origin}")


def test_a_header_with_a_key_goes_before_the_environment() -> None:
    for header in (f"authorization: Bearer {OTHER}", f"x-api-key: {OTHER}"):
        arguments = ("explain", POLICIES, "--path", "/v1/chat/completions", "--header", header, "--json", "-")
        ran = _ran(*arguments, SIDECAR_API_KEY=KEY)
        assert json.loads(ran.stdout)["tenant"]["name"] == "research-batch"


def test_replay_takes_the_key_from_a_file_or_the_environment(tmp_path: Path, sidecar: str) -> None:
    target = tmp_path / "lines.jsonl"
    for arguments, variables in _ways(tmp_path, "--api-"):
        replay = ("replay", "burst:1:5:5", "--upstream", sidecar, "--mix", "high=1", "--requests", str(target))
        assert _ran(*replay, *arguments, **variables).returncode == 0
        assert json.loads(target.read_text())["status"] == 200
    refused = _ran(*replay, SIDECAR_API_KEY="sk-unknown-to-the-policy")
    assert refused.returncode == 1
    assert "set SIDECAR_API_KEY, or give --api-key-file FILE, or --by key with --key-file TIER=FILE" in (
        refused.stdout + refused.stderr
    )


def test_replay_takes_the_key_of_each_tier_from_its_file(tmp_path: Path, sidecar: str) -> None:
    (tmp_path / "high").write_text(f"{KEY}\n")
    keys = ("--key-file", f"high={tmp_path / 'high'}", "--key", f"batch={OTHER}")
    ran = _ran("replay", "burst:2:5:5", "--upstream", sidecar, "--by", "key", "--mix", "high=1,batch=1", *keys)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", ["doctor", "init"])
def test_doctor_and_init_take_the_key_from_a_file_or_the_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours, engines = f"Bearer {KEY}", f"Bearer {OTHER}"
    both = ([], {"SIDECAR_API_KEY": KEY, "SIDECAR_ENGINE_KEY": OTHER})
    ways = [(*way, ours) for way in _ways(tmp_path)] + [([], {"SIDECAR_ENGINE_KEY": OTHER}, engines), ([], {}, None)]
    for arguments, variables, sent in [*ways, (*both, ours if name == "doctor" else engines)]:
        with monkeypatch.context() as environment, serving_pages({}) as server:
            for variable, value in variables.items():
                environment.setenv(variable, value)
            assert main([name, "--upstream", server.url, *arguments]) in (1, 2)
            assert {headers["authorization"] for _, headers in server.asked} == {sent}


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", POLICIES, "--path", "/v1/chat/completions", "--key-file", "{file}"),
        ("doctor", "--upstream", "http://127.0.0.1:9", "--key-file", "{file}"),
        ("init", "--upstream", "http://127.0.0.1:9", "--dir", "{folder}/new", "--key-file", "{file}"),
        ("replay", "burst:1", "--upstream", "http://127.0.0.1:9", "--api-key-file", "{file}"),
        ("replay", "burst:1", "--upstream", "http://127.0.0.1:9", "--by", "key", "--key-file", "high={file}"),
    ],
)
def test_a_file_that_holds_no_key_is_said_so_and_not_shown(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key.txt"
    for content, said in (("key   sk-hidden\n", "contains a space"), ("", "is empty"), (None, "cannot be read")):
        file.unlink(missing_ok=True) if content is None else file.write_text(content)
        try:
            code = main([part.format(file=file, folder=tmp_path) for part in arguments])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        printed = capsys.readouterr()
        assert code in (1, 2)
        assert f"key-file: {said}" in printed.err or f"key-file: '{file}' {said}" in printed.err
        assert "hidden" not in printed.out + printed.err
        assert "Traceback" not in printed.err


def test_a_key_on_the_command_line_and_one_in_a_file_are_one_too_many() -> None:
    said = complaint("explain", POLICIES, "--path", "/x", "--key", "sk-hidden", "--key-file", "key.txt", code=2)
    assert "not allowed with argument --key" in said
    assert "hidden" not in said
