"""Metrics and documents of several processes as those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidecar.cluster.sampler import FIGURES
from sidecar.figures import Over
from sidecar.server import CannotServe
from sidecar.workers import supervisor
from sidecar.workers.crew import environment_for
from sidecar.workers.documents import merged_engines, merged_pool, merged_state
from sidecar.workers.metrics import OWN, WorkersMetrics
from sidecar.workers.restarts import PAUSES_S, STEADY_S, Restarts, how_it_ended

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
    "available": 1,
    "capacity": 100,
    "aborting": 0,
    "admitted": 0,
    "rejected": 0,
    "waits": 0,
    "trace": "a",
    "at": 1,
}


def shown(metrics: WorkersMetrics) -> dict[str, float]:
    text, content_type = metrics.text(None, serving=2, restarts=0)
    assert content_type.startswith("text/plain")
    lines = (line for line in text.decode().splitlines() if not line.startswith(("#", "admission_worker")))
    return {name.partition("{")[0]: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def answers(**of_each: dict[str, Any]) -> dict[int, str]:
    return {int(pid[1:]): SHARED.format(**GIVEN | given) for pid, given in of_each.items()}


def test_counters_and_what_each_holds_are_added_up_and_the_pool_is_shown_once() -> None:
    metrics = WorkersMetrics()
    given = answers(p1={"admitted": 3, "aborting": 5, "waits": 1}, p2={"admitted": 4, "aborting": 6, "waits": 2})
    metrics.note(given, [1, 2])
    found = shown(metrics)
    assert found["admission_admitted_total"] == 7
    assert found["admission_aborting_tokens"] == 11
    assert found["admission_capacity_tokens"] == 100
    assert found["admission_queue_wait_seconds_count"] == 3


def test_while_the_store_is_lost_for_all_their_parts_are_added_up() -> None:
    metrics = WorkersMetrics()
    metrics.note(answers(p1={"available": 0, "capacity": 50}, p2={"available": 1, "capacity": 100}), [1, 2])
    assert (shown(metrics)["admission_capacity_tokens"], shown(metrics)["admission_store_available"]) == (100, 0)
    metrics.note(answers(p1={"available": 0, "capacity": 50}, p2={"available": 0, "capacity": 49}), [1, 2])
    assert shown(metrics)["admission_capacity_tokens"] == 99


def test_what_an_ended_process_counted_still_counts_and_what_it_held_does_not() -> None:
    metrics = WorkersMetrics()
    metrics.note(answers(p1={"admitted": 3, "aborting": 5}, p2={"admitted": 4, "aborting": 6}), [2])
    metrics.note(answers(p2={"admitted": 5, "aborting": 6}, p3={"admitted": 1}), [2, 3])
    assert shown(metrics)["admission_admitted_total"] == 3 + 5 + 1
    assert shown(metrics)["admission_aborting_tokens"] == 6
    metrics.note({}, [])
    assert shown(metrics) == {
        "admission_admitted_total": 9,
        "admission_policy_rejected_total": 0,
        "admission_queue_wait_seconds_bucket": 0,
        "admission_queue_wait_seconds_count": 0,
        "admission_queue_wait_seconds_sum": 0,
    }


def test_a_process_that_is_silent_counts_as_it_did_last() -> None:
    metrics = WorkersMetrics()
    metrics.note(answers(p1={"admitted": 3, "aborting": 5}, p2={"admitted": 4}), [1, 2])
    metrics.note(answers(p2={"admitted": 6}), [1, 2])
    assert (shown(metrics)["admission_admitted_total"], shown(metrics)["admission_aborting_tokens"]) == (9, 5)


def test_what_all_processes_see_is_counted_once_and_does_not_fall() -> None:
    metrics = WorkersMetrics()
    metrics.note(answers(p1={"rejected": 1}, p2={"rejected": 1}), [1, 2])
    assert shown(metrics)["admission_policy_rejected_total"] == 1
    metrics.note(answers(p1={"rejected": 2}, p2={"rejected": 1}), [2])
    metrics.note(answers(p2={"rejected": 2}, p3={"rejected": 0}), [2, 3])
    assert shown(metrics)["admission_policy_rejected_total"] == 2


def test_what_one_process_sees_before_a_scrape_and_another_after_it_is_counted_once() -> None:
    metrics = WorkersMetrics()
    for one, two in ((0, 0), (1, 0), (1, 1), (3, 2), (3, 3)):
        metrics.note(answers(p1={"rejected": one}, p2={"rejected": two}), [1, 2])
    assert shown(metrics)["admission_policy_rejected_total"] == 3
    metrics.note(answers(p2={"rejected": 3}, p3={"rejected": 0}), [2, 3])  # another in its place
    metrics.note(answers(p2={"rejected": 4}, p3={"rejected": 0}), [2, 3])
    metrics.note(answers(p2={"rejected": 4}, p3={"rejected": 1}), [2, 3])
    assert shown(metrics)["admission_policy_rejected_total"] == 4


def test_of_the_exemplars_the_newest_is_shown() -> None:
    metrics = WorkersMetrics()
    given = answers(p1={"waits": 1, "trace": "older", "at": 5}, p2={"waits": 1, "trace": "newer", "at": 6})
    metrics.note(given, [1, 2])
    text, _ = metrics.text("application/openmetrics-text; version=1.0.0", serving=2, restarts=0)
    assert 'le="1.0"} 2.0 # {trace_id="newer"} 0.5 6.0' in text.decode()
    assert b"older" not in text


def test_a_gauge_of_this_process_is_added_up_or_a_maximum_makes_sense_of_it() -> None:
    own = {it.name for it in FIGURES if not it.is_counter and ("this process" in it.help or "these" in it.help)}
    most = {"admission.queue.oldest_wait", "admission.queue.longest_starvation", "admission.engine.state"}
    assert {name.replace(".", "_") for name in own - most} == OWN
    assert {it.over for it in FIGURES if it.is_counter} == {Over.SUM, Over.ONCE}


def pool(state: str, leases: int, own: int, tokens: int) -> dict[str, Any]:
    queued = {"tokens": own * 7, "requests": own}
    tiers = [{"tier": "a", "held": {"tokens": leases * 10}, "queued": queued, "limit": {"tokens": None}}]
    store = {"state": state, "own": {"leases": own, "waiting": 1}}
    return {"capacity": {"tokens": tokens}, "leases": leases, "tiers": tiers, "store": store}


def test_a_pool_is_shown_as_the_store_has_it_and_without_the_store_as_the_sum_of_the_parts() -> None:
    shared = merged_pool([pool("divided", 1, 1, 50), pool("shared", 5, 2, 100)])
    assert (shared["leases"], shared["capacity"]["tokens"]) == (5, 100)
    assert shared["store"]["own"] == {"leases": 3, "waiting": 2}
    (tier,) = shared["tiers"]
    assert (tier["held"], tier["queued"]) == ({"tokens": 50}, {"tokens": 21, "requests": 3})
    lost = merged_pool([pool("divided", 1, 1, 50), pool("divided", 2, 2, 50)])
    assert (lost["leases"], lost["capacity"]["tokens"]) == (3, 100)
    queued = {"tokens": 21, "requests": 3}
    assert lost["tiers"] == [{"tier": "a", "held": {"tokens": 30}, "queued": queued, "limit": {"tokens": None}}]


def state(leases: int, *, draining: bool = False) -> dict[str, Any]:
    return {
        "mode": "enforce",
        "draining": draining,
        "under_way": leases,
        "shadows": 0,
        "aborting": {"requests": 1, "tokens": 10},
        "background": 0,
        "lease_sizes": {"of": leases},
    }


def test_the_state_of_models_is_merged_model_by_model() -> None:
    one, two = ({**state(n), "models": {"m": {"pool": pool("shared", 7, n, 100), "gain": n}}} for n in (3, 4))
    merged = merged_state([{"worker": 1}, {"worker": 2}, {"worker": 3}], [one, two, None])
    assert (merged["under_way"], merged["aborting"]) == (7, {"requests": 2, "tokens": 20})
    assert merged["models"]["m"]["pool"]["leases"] == 7
    assert merged["models"]["m"]["pool"]["store"]["own"]["leases"] == 7
    assert "gain" not in merged["models"]["m"]
    assert "lease_sizes" not in merged
    assert [row.get("lease_sizes") for row in merged["workers"]] == [{"of": 3}, {"of": 4}, None]
    assert [row.get("models") for row in merged["workers"]] == [{"m": {"gain": 3}}, {"m": {"gain": 4}}, None]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_was_started_again_by_another_policy_hides_none_of_the_others(*, is_first: bool) -> None:
    shared = {**state(3), "pool": pool("shared", 5, 2, 100)}
    other_tiers = pool("divided", 1, 1, 50)
    other_tiers["tiers"] = [{**other_tiers["tiers"][0], "tier": name} for name in ("a", "b")]
    passing = pool("divided", 1, 1, 50)
    del passing["store"]
    for pool_of_other in (other_tiers, passing):
        answers = [shared, {**state(1), "pool": pool_of_other}]
        merged = merged_state([{"worker": 1}, {"worker": 2}], answers if is_first else answers[::-1])
        assert (merged["under_way"], merged["pool"]) == (4, shared["pool"])
    with_models = {**state(1), "models": {"m": {"pool": pool("shared", 1, 1, 50)}}}
    answers = [shared, with_models]
    merged = merged_state([{"worker": 1}, {"worker": 2}], answers if is_first else answers[::-1])
    assert (merged["under_way"], merged["pool"], "models" in merged) == (4, shared["pool"], False)


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
