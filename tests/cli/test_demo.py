"""`sidecar demo` as a user runs it: for real, alone and as replicas; the rest with the runs taken out."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from sidecar.cli import main
from sidecar.policy.store import store_address
from sidecar.pools.calls import TierHeld
from sidecar.tools.demo import runs as demo_runs
from sidecar.tools.demo.figures import RunMeasurement
from tests.support.commands import command
from tests.support.http import fetch
from tests.support.in_process import complaint, output, ran
from tests.support.redis_servers import RedisServer, first_binary, free_port, until
from tests.tools.demo.figures import run_figures, three

DISTRIBUTIONS = ("ttft_s", "queue_wait_s", "starvation_s")
LADDER = ["critical", "high", "normal", "low", "batch"]
Play = Callable[..., RunMeasurement]


def live_page(process: subprocess.Popen[str]) -> str:
    """The address in the first line of `sidecar demo`."""
    first = process.stdout.readline()
    found = re.fullmatch(r"Live page of the third run, while the demo runs: (http://127\.0\.0\.1:\d+/)\n", first)
    assert found, first
    return found[1]


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed from there on."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out, errors


@pytest.mark.long
@pytest.mark.alone
def test_three_seconds_of_it_and_its_live_page_show_what_admission_does(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    # A store that is meant for servers is none of the demo's: it would play in, or wait for, somebody's real pool.
    with command("demo", "--seconds", "3", "--json", str(file), SIDECAR_STORE="redis://127.0.0.1:9/0") as demo:
        page = live_page(demo)
        assert b"<!doctype html>" in fetch(page).body.lower()
        until(lambda: fetch(f"{page}overview").json["held"]["requests"] > 100, "the third run plays")
        out, errors = ended(demo)
    assert "the tier that pays (normal)" in out.splitlines()[-1]
    assert "admission" in errors, "no progress was shown"

    runs = {run.pop("name"): run for run in json.loads(file.read_bytes())["runs"]}
    assert list(runs) == ["control", "engine", "admission"]
    for run in runs.values():
        assert run["failed"] == 0
        assert 0.5 < run["utilization"] <= 1.01
        assert list(run["tiers"]) == LADDER
        assert sum(tier["share"] for tier in run["tiers"].values()) == pytest.approx(1)
        for tier in run["tiers"].values():
            assert set(tier) == {"requests", "answered", "share", *DISTRIBUTIONS}
            for name in DISTRIBUTIONS:
                assert list(tier[name]) == ["p50", "p95", "p99"]
                assert sorted(tier[name].values()) == list(tier[name].values())
            assert tier["starvation_s"]["p99"] <= tier["queue_wait_s"]["p99"]
    counts = [{name: tier["requests"] for name, tier in run["tiers"].items()} for run in runs.values()]
    assert counts[0] == counts[1] == counts[2], "the runs had different arrivals"
    assert [run["replicas"] for run in runs.values()] == [0, 0, 1]
    assert runs["admission"]["answered_by_replica"] == [sum(counts[2].values())]

    def late_s(run: str, tier: str, figure: str = "ttft_s") -> float:
        # Not the median: the queue takes half of these three seconds to form.
        return float(runs[run]["tiers"][tier][figure]["p95"])

    # On an idle machine 0.2 s against 0.9 s; a busy one adds to both.
    assert late_s("admission", "high") < late_s("control", "high") / 1.5
    assert late_s("admission", "high", "queue_wait_s") < late_s("control", "high", "queue_wait_s") / 2
    # The whole engine is used, and a burst of urgent requests does not wait: 99% and 0.3 s on an idle machine.
    assert runs["admission"]["utilization"] >= 0.9 * runs["control"]["utilization"]
    assert late_s("admission", "critical") < late_s("control", "critical") / 1.5
    # At equal priority a request waits only its turn.
    assert late_s("control", "batch", "starvation_s") < 0.1


def plays_on_three(shown: Any) -> bool:
    return len(shown["replicas"]) == 3 and shown["held"]["requests"] > 100


@pytest.mark.soak
def test_replicas_share_one_pool_and_page_and_leave_nothing_in_the_store_that_stays(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    with RedisServer(first_binary(), tmp_path, password="opensesame") as server:
        with command("demo", "--replicas", "3", "--store", server.url, "--seconds", "3", "--json", str(file)) as demo:
            page = live_page(demo)
            until(lambda: plays_on_three(fetch(f"{page}overview").json), "the third run plays on three replicas")
            out, errors = ended(demo)
        left = server.command("KEYS", "*")
        assert [bool(re.fullmatch(r"ledger:\{demo-[0-9a-f]{16}\}", key)) for key in left] == [True], left
        assert server.command("PTTL", left[0]) > 0
        with Redis.from_url(server.url) as client:
            packed = client.hget(left[0], "held")
    assert f"admission, 3 replicas through redis://:***@127.0.0.1:{server.port}/0  (util" in out
    assert "opensesame" not in out + errors
    assert "store" not in errors, "it was lost on the way"

    runs = {run.pop("name"): run for run in json.loads(file.read_bytes())["runs"]}
    assert [run["failed"] for run in runs.values()] == [0, 0, 0]
    admission, control = (runs[name]["tiers"] for name in ("admission", "control"))
    counts = [admission[tier]["requests"] for tier in LADDER]
    assert counts == [control[tier]["requests"] for tier in LADDER]
    assert runs["admission"]["replicas"] == 3
    assert min(runs["admission"]["answered_by_replica"]) > sum(counts) / 6
    assert sum(runs["admission"]["answered_by_replica"]) == sum(counts)

    # All of them were admitted by the one pool, and have ended there.
    tiers = msgspec.convert(msgspec.msgpack.decode(b"\x92" + packed)[1], list[TierHeld])
    assert [tier.tier for tier in tiers] == LADDER
    assert [tier.on_engines for tier in tiers] == [(0, 0, 0)] * len(LADDER)
    assert all(tier.served >= requests > 0 for tier, requests in zip(tiers, counts, strict=True))

    # On an idle machine 0.1 s against 0.3 s.
    assert admission["high"]["queue_wait_s"]["p95"] < control["high"]["queue_wait_s"]["p95"] / 1.5
    assert admission["high"]["ttft_s"]["p95"] < control["high"]["ttft_s"]["p95"]


@pytest.mark.long
@pytest.mark.alone
def test_twelve_seconds_of_the_other_scene_show_an_slo_that_is_held(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    ended = ran("demo", "--slo", "--no-page", "--seconds", "12", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    free, held = json.loads(file.read_bytes())["runs"]
    assert (free["name"], held["name"]) == ("free", "held")
    assert free["requests"] == held["requests"] > 20
    # On an idle machine 0% and 100%, and 380 and 220 batch tokens a second.
    assert free["met"] < 0.3
    assert held["met"] > free["met"] + 0.5
    assert held["batch_tokens_per_s"] > 0.25 * free["batch_tokens_per_s"]
    assert "hold: 97%" in ended.stdout


def test_the_other_scene_has_no_replicas() -> None:
    assert "argument --slo: its servers share nothing" in complaint(
        "demo", "--slo", "--store", "redis://127.0.0.1:6379/0", code=2
    )


def test_a_store_that_does_not_answer_is_said_in_one_line_before_anything_runs() -> None:
    port = free_port()
    ended = ran("demo", "--replicas", "2", "--store", f"redis://:opensesame@127.0.0.1:{port}/0")
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith(
        f"sidecar demo: the store redis://:***@127.0.0.1:{port}/0 cannot be used: connection refused by "
    )
    assert "opensesame" not in ended.stdout + ended.stderr


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], None]:
    """Replaces the servers, and the playing of a run by what the test gives."""

    @contextmanager
    def nowhere(runs: Sequence[demo_runs.DemoRun], _: Path) -> Iterator[dict[str, demo_runs.RunServers]]:
        yield {run.name: demo_runs.RunServers([1], 1, 1) for run in runs}

    def replace(play: Play) -> None:
        monkeypatch.setattr("sidecar.cli.demo.servers", nowhere)
        monkeypatch.setattr("sidecar.cli.demo.play_run", play)

    return replace


def figures_of(run: demo_runs.DemoRun, *_: Any) -> RunMeasurement:
    return {figures.name: figures for figures in three()}[run.name]


def test_json_on_standard_output_is_alone_there(
    no_servers: Callable[[Play], None], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    no_servers(figures_of)
    assert main(["demo", "--json", "-"]) == 0
    out, error = capfdbinary.readouterr()
    assert [run["name"] for run in json.loads(out)["runs"]] == ["control", "engine", "admission"]
    assert b"admission control does neither" in error


def test_without_a_page_none_is_named(no_servers: Callable[[Play], None]) -> None:
    no_servers(figures_of)
    assert "http://" in ran("demo").stdout
    ended = ran("demo", "--no-page")
    assert "http://" not in ended.stdout + ended.stderr
    assert "page" not in ended.stdout + ended.stderr


def test_a_failed_request_is_a_failed_demo(no_servers: Callable[[Play], None]) -> None:
    no_servers(lambda run, *_: run_figures(run.name, failed=1))
    assert "1 failed" in output("demo", code=1)


def test_every_run_gets_the_same_arrivals(no_servers: Callable[[Play], None]) -> None:
    played = []

    def play(run: demo_runs.DemoRun, _: demo_runs.RunServers, arrivals: Any, *__: Any) -> RunMeasurement:
        played.append((run.name, arrivals))
        return figures_of(run)

    no_servers(play)
    assert main(["demo", "--seed", "4", "--seconds", "1"]) == 0
    assert [name for name, _ in played] == ["control", "engine", "admission"]
    assert played[0][1] == played[1][1] == played[2][1]


def test_a_store_alone_means_one_replica(no_servers: Callable[[Play], None]) -> None:
    no_servers(figures_of)
    said = output("demo", "--store", "redis://:opensesame@127.0.0.1")
    assert "admission, 1 replica through redis://:***@127.0.0.1:6379/0  (util" in said
    assert "opensesame" not in said


def test_replicas_without_a_store_read_what_to_write() -> None:
    assert "add --store redis://127.0.0.1:6379/0" in complaint("demo", "--replicas", "3", code=2)


@pytest.mark.parametrize("store", ["127.0.0.1:6379", "http://127.0.0.1", "redis://:open@sesame@127.0.0.1", ""])
def test_a_store_address_that_cannot_be_read_is_said_so(store: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as mistake:
        store_address(store)
    said = complaint("demo", "--replicas", "3", f"--store={store}", code=2)
    assert said.splitlines()[-1] == f"sidecar demo: error: argument --store: {mistake.value}"
    assert "sesame" not in said
