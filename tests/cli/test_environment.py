"""Options from the environment, for every command; and the script that completes commands in a shell."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli import COMMANDS, main
from sidecar.cli.environment import from_environment, options_by_name, variable_for
from tests.support.in_process import complaint, output


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"sidecar {command}")
    importlib.import_module(f"sidecar.cli.{command.replace('-', '_')}").configure(parser)
    return parser


def read(command: str, *given: str, **environment: str) -> argparse.Namespace:
    parser = parser_of(command)
    variables = {f"SIDECAR_{command.upper()}_{name}": value for name, value in environment.items()}
    return parser.parse_args([*from_environment(parser, command, given, variables), *given])


def test_every_option_has_a_variable_of_its_own() -> None:
    for command in COMMANDS:
        names = [variable_for(command, option) for option in options_by_name(parser_of(command))]
        assert len(set(names)) == len(names)
    assert variable_for("trtllm-serve", "--admin-port") == "SIDECAR_TRTLLM_SERVE_ADMIN_PORT"


def test_a_variable_counts_as_its_option_would() -> None:
    args = read("serve", PORT="81", GRACE="2m", TAKE_OVER_POOL="yes", UPSTREAM="http://engine:8000/v1", LOG_LEVEL="")
    assert (args.port, args.grace, args.take_over_pool, args.upstream) == (81, 120.0, True, "http://engine:8000")
    assert args.log_level is None
    assert read("serve", TAKE_OVER_POOL="0").take_over_pool is False


@pytest.mark.parametrize("given", [("--port", "82"), ("--port=82",)])
def test_the_command_line_goes_first(given: tuple[str, ...]) -> None:
    assert read("serve", *given, PORT="81").port == 82
    assert read("serve", "--upstream", "http://a:1", UPSTREAM="http://b:2").upstream == "http://a:1"  # not given twice


def test_the_command_line_goes_before_what_it_excludes(tmp_path: Path) -> None:
    args = read("doctor", "--key-file", str(tmp_path), KEY="sk-of-the-environment")
    assert (args.key, args.key_file) == (None, str(tmp_path))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PORT": "http"}, "SIDECAR_SERVE_PORT: 'http' is not a port"),
        ({"PORT": "tcp://10.0.0.1:80"}, "Kubernetes sets such variables for a Service called sidecar-serve"),
        ({"LOG_LEVEL": "loud"}, "SIDECAR_SERVE_LOG_LEVEL: 'loud' is none of debug, info, warning, error"),
        ({"TAKE_OVER_POOL": "perhaps"}, "SIDECAR_SERVE_TAKE_OVER_POOL: 'perhaps' is neither 1 nor 0"),
    ],
)
def test_a_mistake_names_the_variable(
    environment: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read("serve", **environment)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert read_help(**environment)  # help is shown all the same


def read_help(**environment: str) -> bool:
    with pytest.raises(SystemExit) as ended:
        read("serve", "--help", **environment)
    return ended.value.code == 0


def test_a_command_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_SERVE_POLICY", "/nowhere/policy.yaml")
    assert "/nowhere/policy.yaml" in complaint("serve", "--upstream", "http://127.0.0.1:9")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_completion_script_has_every_command(shell: str) -> None:
    script = output("completion", shell)
    assert all(command in script for command in COMMANDS)


def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a real bash: what it would offer after these words."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "sidecar.bash"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; COMP_WORDS=(sidecar serve --take); COMP_CWORD=2; _shtab_sidecar; echo ${{COMPREPLY[@]}};"
        "COMP_WORDS=(sidecar obs); COMP_CWORD=1; _shtab_sidecar; echo ${COMPREPLY[@]}"
    )
    found = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, timeout=20)
    assert found.stdout.split() == ["--take-over-pool", "observed"]


def test_without_shtab_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install './admission-sidecar[completion]'" in complaint("completion", "bash", code=2)
