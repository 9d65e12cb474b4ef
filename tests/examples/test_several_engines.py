"""examples/several-engines: its commands in their order, on other ports."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from tests.examples.command_lines import EXAMPLES, parsed, shell_lines
from tests.examples.running import TIMEOUT_S, Sidecar, fetched
from tests.support.commands import address, command
from tests.support.ports import free_ports
from tests.support.redis_servers import until

pytestmark = pytest.mark.long

FOLDER = EXAMPLES / "several-engines"
LINES = shell_lines(FOLDER / "README.md")
EMULATE, SERVE, REPLAY, LIST, DRAIN, RESUME = (shlex.split(line)[1:] for line in LINES)
PORTS = ("8000", "8001", "8002")


def moved(words: list[str], **other: str) -> list[str]:
    """A command line with other values for some of its options, each of which it has."""
    words = list(words)
    for name, value in other.items():
        words[words.index(f"--{name}") + 1] = value
    return words


@contextmanager
def running(folder: Path) -> Iterator[Sidecar]:
    """The engines and the sidecar, by the first two commands."""
    first = free_ports(len(PORTS))
    text = (FOLDER / "policy.yaml").read_text()
    for number, port in enumerate(PORTS):
        assert text.count(f"127.0.0.1:{port}") == 1
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{first + number}")
    (folder / "policy.yaml").write_text(text)
    with command(*moved(EMULATE, port=str(first))) as engines:
        for _ in PORTS:
            address(engines)
        with command(*moved(SERVE, policy=str(folder), port="0"), "--admin-port", "0") as process:
            found = Sidecar(address(process), address(process), process)
            until(lambda: fetched(f"{found.admin}/readyz")[0] == 200, "it is ready", TIMEOUT_S)
            yield found
            engines.terminate()
            engines.wait(TIMEOUT_S)


def said(*words: str) -> str:
    argv = [sys.executable, "-m", "sidecar.cli", *words]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def states(listed: str) -> dict[str, str]:
    """The state of each engine in the table of `sidecar engines list`."""
    return {line.split("#")[0]: line.split()[1] for line in listed.splitlines()[1:] if "#" in line.split()[0]}


def test_the_commands_of_the_page_run_in_their_order(tmp_path: Path) -> None:
    with running(tmp_path) as found:
        at = ["--admin", found.admin]
        assert set(states(said(*LIST, *at)).values()) <= {"ready", "starting"}
        replay = [word.replace("burst:200:256:64", "burst:60:64:4") for word in moved(REPLAY, upstream=found.url)]
        assert replay != moved(REPLAY, upstream=found.url)
        table = said(*replay)
        assert all(tier in table for tier in ("high", "normal", "batch"))
        rows = {row["name"]: row for row in found.page("/engines")["engines"]}
        assert all(row["prompt_tokens"] for row in rows.values()), "each engine has served some"
        assert "is empty" in said(*DRAIN, *at)
        assert states(said(*LIST, *at))["b"] == "draining"
        said(*RESUME, *at)
        assert states(said(*LIST, *at))["b"] != "draining"


def test_the_policy_is_true_of_the_engines_that_the_page_starts() -> None:
    args, policy = parsed(EMULATE), load(FOLDER)
    assert [engine.url.rpartition(":")[2] for engine in policy.engines.static] == list(PORTS)
    assert (args.replicas, args.port) == (len(PORTS), int(PORTS[0]))
    assert {engine.capacity.size(None, None)[1] for engine in policy.engines.static} == {args.max_num_seqs + 2}


def test_every_tier_that_the_replay_asks_for_is_granted_without_a_key() -> None:
    policy = load(FOLDER)
    assert "--key" not in REPLAY
    asked = [part.partition("=")[0] for part in REPLAY[REPLAY.index("--mix") + 1].split(",")]
    assert asked == [tier.name for tier in policy.tiers[policy.anonymous.max_level :]]
