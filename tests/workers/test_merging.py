"""Metrics and documents of several processes as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from sidecar.cluster.sampler import FIGURES
from sidecar.figures import Over
from sidecar.server import CannotServe
from sidecar.workers import supervisor
from sidecar.workers.crew import environment_for
from sidecar.workers.documents import merged_engines, merged_state
from sidecar.workers.metrics import WorkersMetrics
from sidecar.workers.restarts import PAUSES_S, STEADY_S, Restarts, how_it_ended
from tests.support.each import each

SHARED = """\
# TYPE admission_store_available gauge
admission_store_available{{admission_pool="p"}} {available}
# TYPE admission_capacity_tokens gauge
admission_capacity_tokens{{admission_pool="p"}} {capacity}
# TYPE admission_aborting_tokens gauge
admission_aborting_tokens{{admission_pool="p"}} {aborting}
# TYPE admission_admitted counter
admission_admitted_total{{admission_pool="p"}} {admitted}
# TYPE admission_policy_rejected counter
admission_policy_rejected_total{{admission_pool="p"}} {rejected}
# TYPE admission_queue_wait_seconds histogram
# UNIT admission_queue_wait_seconds seconds
admission_queue_wait_seconds_bucket{{admission_pool="p",le="1.0"}} {waits} # {{trace_id="{trace}"}} 0.5 {at}
admission_queue_wait_seconds_bucket{{admission_pool="p",le="+Inf"}} {waits}
admission_queue_wait_seconds_count{{admission_pool="p"}} {waits}
admission_queue_wait_seconds_sum{{admission_pool="p"}} {waits}
# EOF
"""
GIVEN = {
    "available": 1, "capacity": 100, "aborting": 0, "admitted": 0, "rejected": 0, "waits": 0, "trace": "a", "at": 1,
}  # fmt: skip
ADMITTED, REJECTED = "admission_admitted_total", "admission_policy_rejected_total"
ABORTING, CAPACITY, WORKERS = "admission_aborting_tokens", "admission_capacity_tokens", "admission_worker"


def merged(*scrapes: dict[int, dict[str, Any]], running: Sequence[Sequence[int]] = ()) -> WorkersMetrics:
    """Of what processes answered to scrapes one after the other; all run on, but where `running` says which."""
    metrics = WorkersMetrics()
    for number, answers in enumerate(scrapes):
        texts = {pid: SHARED.format(**GIVEN | given) for pid, given in answers.items()}
        metrics.note(texts, running[number] if running else [1, 2], serving=2, restarts=0)
    return metrics


def shown(metrics: WorkersMetrics) -> dict[str, float]:
    lines = (line for line in generate_latest(metrics).decode().splitlines() if not line.startswith(("#", WORKERS)))
    return {name.partition("{")[0]: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_counters_and_what_each_holds_are_added_up_and_the_pool_is_shown_once() -> None:
    found = shown(
        merged({1: {"admitted": 3, "aborting": 5, "waits": 1}, 2: {"admitted": 4, "aborting": 6, "waits": 2}})
    )
    assert found[ADMITTED] == 7
    assert found[ABORTING] == 11
    assert found[CAPACITY] == 100
    assert found["admission_queue_wait_seconds_count"] == 3


def test_the_store_is_available_where_it_is_for_all() -> None:
    found = shown(merged({1: {"available": 0, "capacity": 50}, 2: {"available": 1, "capacity": 100}}))
    assert (found[CAPACITY], found["admission_store_available"]) == (100, 0)


def test_what_an_ended_process_counted_still_counts_and_what_it_held_does_not() -> None:
    first = {1: {"admitted": 3, "aborting": 5}, 2: {"admitted": 4, "aborting": 6}}
    then = {2: {"admitted": 5, "aborting": 6}, 3: {"admitted": 1}}
    found = shown(merged(first, then, running=([2], [2, 3])))
    assert (found[ADMITTED], found[ABORTING]) == (3 + 5 + 1, 6)
    found = shown(merged(first, then, {}, running=([2], [2, 3], [])))
    assert (found[ADMITTED], ABORTING in found, CAPACITY in found) == (9, False, False)


def test_a_process_that_is_silent_counts_as_it_did_last() -> None:
    found = shown(merged({1: {"admitted": 3, "aborting": 5}, 2: {"admitted": 4}}, {2: {"admitted": 6}}))
    assert (found[ADMITTED], found[ABORTING]) == (9, 5)


def test_what_all_processes_see_is_counted_once_whichever_sees_it_first_and_does_not_fall() -> None:
    seen = [{1: {"rejected": one}, 2: {"rejected": two}} for one, two in ((1, 1), (2, 1), (2, 2), (4, 3), (4, 4))]
    assert [shown(merged(*seen[: number + 1]))[REJECTED] for number in range(5)] == [1, 2, 2, 4, 4]
    with_another = [{2: {"rejected": two}, 3: {"rejected": three}} for two, three in ((4, 0), (5, 0), (5, 1))]
    scrapes, running = [*seen, *with_another], [*([1, 2],) * 4, [2], *([2, 3],) * 3]
    assert [shown(merged(*scrapes[:end], running=running))[REJECTED] for end in (6, 7, 8)] == [4, 5, 5]


def test_of_the_exemplars_the_newest_is_shown() -> None:
    given = {1: {"waits": 1, "trace": "older", "at": 5}, 2: {"waits": 1, "trace": "newer", "at": 6}}
    text = openmetrics.generate_latest(merged(given)).decode()
    assert 'le="1.0"} 2.0 # {trace_id="newer"} 0.5 6.0' in text
    assert "older" not in text


def test_a_gauge_of_this_process_is_added_up_or_a_maximum_makes_sense_of_it() -> None:
    gauges = [it for it in FIGURES if not it.is_counter]
    own = {it.name for it in gauges if "this process" in it.help or "these" in it.help}
    most = {"admission.queue.oldest_wait", "admission.queue.longest_starvation", "admission.engine.state"}
    assert own - most == {it.name for it in gauges if it.over is Over.SUM}
    assert {it.over for it in FIGURES if it.is_counter} == {Over.SUM, Over.MOST}


def pool(state: str, leases: int) -> dict[str, Any]:
    return {"capacity": {"tokens": 100}, "leases": leases, "store": {"state": state}}


def state(leases: int) -> dict[str, Any]:
    return {
        "mode": "enforce",
        "draining": False,
        "under_way": leases,
        "shadows": 0,
        "aborting": {"requests": 1, "tokens": 10},
        "background": 0,
    }


@each("is_first", [True, False])
def test_the_state_is_that_of_a_worker_that_shares_the_pool_and_each_workers_own_beside_it(*, is_first: bool) -> None:
    shared, alone = {**state(3), "pool": pool("shared", 5)}, {**state(1), "pool": pool("divided", 1)}
    answers = [shared, alone] if is_first else [alone, shared]
    merged = merged_state([{"worker": 1}, {"worker": 2}, {"worker": 3}], [*answers, None])
    assert (merged["under_way"], merged["aborting"], merged["pool"]) == (
        4, {"requests": 2, "tokens": 20}, shared["pool"],
    )  # fmt: skip
    assert merged["workers"] == [{**answers[0], "worker": 1}, {**answers[1], "worker": 2}, {"worker": 3}]


def test_without_any_answer_the_state_has_the_workers_alone() -> None:
    row = {"worker": 1, "state": "starting"}
    assert merged_state([row], [None]) == {"workers": [row]}


def test_what_processes_count_at_an_engine_is_added_up() -> None:
    counts = {"replays": {"refused": 1}, "ejections": {}, "prompt_tokens": 5, "predicted_tokens": 0}
    row = {"name": "a", "id": "1", "held": {"requests": 3}, "in_flight": 2, "measured_tokens": None, **counts}
    other = {**row, "in_flight": 1, "replays": {"down": 2}, "measured_tokens": 7}
    [merged] = merged_engines([{"engines": [row]}, {"engines": [other]}])["engines"]
    assert (merged["held"], merged["in_flight"], merged["prompt_tokens"]) == ({"requests": 3}, 3, 10)
    assert merged["replays"] == {"refused": 1, "down": 2}
    assert merged["measured_tokens"] == 7


def test_an_instance_that_the_environment_names_is_another_in_each_worker() -> None:
    named = {"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.instance.id=pod-7,c=d", "PATH": "/bin"}
    assert environment_for(named, 2) == {**named, "OTEL_RESOURCE_ATTRIBUTES": "a=b,service.instance.id=pod-7-2,c=d"}
    assert environment_for({"PATH": "/bin"}, 2) == {"PATH": "/bin"}


def test_restarts_end_after_some_in_a_row() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(1.0) for _ in range(5)] == [*PAUSES_S, None]
    assert restarts.pause_s(STEADY_S) == 0.0
    assert restarts.total == 5
    assert (how_it_ended(3), how_it_ended(-9)) == ("ended with code 3", "was killed by SIGKILL")


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(CannotServe, match="would be too long; set TMPDIR to a shorter folder"):
        supervisor._private_folder().__enter__()
    assert list(long.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(CannotServe, match=r"No such file or directory\); set TMPDIR"):
        supervisor._private_folder().__enter__()
