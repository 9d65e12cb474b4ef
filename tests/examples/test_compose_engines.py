"""compose.engines.yaml: its engines, sidecars, health checks and load by their commands, and an engine that dies."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.admin.auth import read_access
from tests.examples.command_lines import parsed, replaced
from tests.examples.running import TIMEOUT_S, Sidecar, asked, fetched
from tests.examples.test_compose import COMPOSE, SIDECARS, WITH_ENGINES, is_healthy, load_runs
from tests.support.commands import address, command
from tests.support.redis_servers import RedisServer, first_binary, until

pytestmark = pytest.mark.long

ENGINES = [name for name, service in WITH_ENGINES.items() if service["command"][0] == "emulate"]
HERE = {"--host": "127.0.0.1", "--port": 0}


@contextmanager
def emulated() -> Iterator[dict[str, tuple[str, Any]]]:
    """The three engines: their addresses and processes, by their services' names."""
    with ExitStack() as opened:
        found = {}
        for name in ENGINES:
            process = opened.enter_context(command(*replaced(WITH_ENGINES[name]["command"], HERE)))
            found[name] = (address(process), process)
        yield found


@contextmanager
def sidecars_of(folder: Path, engines: dict[str, tuple[str, Any]], **variables: str) -> Iterator[Sequence[Sidecar]]:
    """Both sidecars, with the policy of the example but for the engines' addresses."""
    shutil.copytree(COMPOSE, folder / "compose")
    policy = (
        folder / "compose" / Path(parsed(WITH_ENGINES[SIDECARS[0]]["command"]).policy).relative_to("/etc/admission")
    )
    text = policy.read_text()
    for name, (url, _) in engines.items():
        assert f'"http://{name}:8000"' in text
        text = text.replace(f"http://{name}:8000", url)
    policy.write_text(text)
    here = {**HERE, "--policy": str(policy), "--admin-host": "127.0.0.1", "--admin-port": 0}
    with ExitStack() as opened:
        found = []
        for name in SIDECARS:
            process = opened.enter_context(command(*replaced(WITH_ENGINES[name]["command"], here), **variables))
            found.append(Sidecar(address(process), address(process), process))
        for each in found:
            until(lambda each=each: fetched(f"{each.admin}/readyz")[0] == 200, "it is ready", TIMEOUT_S)
        yield found


def are_healthy(one: Sidecar, engine: str) -> None:
    """By the commands that say so, as they are but for the ports."""
    is_healthy(WITH_ENGINES[SIDECARS[0]], {9464: one.admin_port})
    is_healthy(WITH_ENGINES[ENGINES[0]], {8000: int(engine.rpartition(":")[2])})


def ends_while_one_is_killed(urls: Sequence[str], process: Any) -> Counter[int]:
    """The statuses of many answers, while an engine's process is killed. None of them has a byte before its end."""
    statuses: Counter[int] = Counter()

    def ask(number: int) -> None:
        statuses[asked(urls[number % len(urls)], "sk-demo-interactive", 20)] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for number, thread in enumerate(threads):
        thread.start()
        if number == len(threads) // 2:
            process.kill()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return statuses


def test_the_admin_port_of_a_container_takes_a_drain_by_its_token() -> None:
    for name in SIDECARS:
        args = parsed(WITH_ENGINES[name]["command"])
        assert not read_access(WITH_ENGINES[name]["environment"], args.admin_host).is_open


def test_both_sidecars_share_one_pool_and_an_engine_that_dies_is_not_noticed(tmp_path: Path) -> None:
    server, *arguments = WITH_ENGINES["store"]["command"]
    assert server == "valkey-server"
    with RedisServer(first_binary(), tmp_path, *arguments) as store, emulated() as engines:
        assert "SIDECAR_STORE" in WITH_ENGINES[SIDECARS[0]]["environment"]
        with sidecars_of(tmp_path, engines, SIDECAR_STORE=store.url) as (one, other):
            until(lambda: other.page("/state")["pool"]["store"]["replicas"] == 2, "it knows of the first", TIMEOUT_S)
            are_healthy(one, engines[ENGINES[0]][0])
            load_runs(WITH_ENGINES["load"]["command"], [one.url, other.url])
            assert ends_while_one_is_killed([one.url, other.url], engines[ENGINES[1]][1]) == {200: 24}
            rows = {row["name"]: row["state"] for row in one.page("/engines")["engines"]}
            assert (rows["a"], rows["c"]) == ("ready", "ready")
