"""Engines as all replicas of a pool see them: sums, different states, and engine lists that differ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.cluster.report import LASTING_S, EngineLists, EngineReport, ReplicaReport, engine_rows, pack, unpack
from sidecar.engines.view import Amount, EngineDocument


def document(name: str, **more: Any) -> EngineDocument:
    plain: dict[str, Any] = {
        "id": f"{name}#1",
        "url": f"http://{name}:8000",
        "state": "ready",
        "reason": None,
        "for_s": 9.0,
        "takes_new": True,
        "draining": False,
        "capacity": Amount(1000, 8),
        "effective": Amount(1000, 8),
        "prefill": 8000,
        "speed": 1.0,
        "held": Amount(300, 3),
        "unprefilled_tokens": 20,
        "claims": 2,
        "in_flight": 1,
    }
    return EngineDocument(name=name, **{**plain, **more})


def report(replica: str, *engines: EngineReport, lists: bool = True) -> ReplicaReport:
    return ReplicaReport(replica, "gpu-2", 0, 0, engines=list(engines) if lists else None)


def seen(name: str, state: str = "ready", **more: Any) -> EngineReport:
    return EngineReport(name, **{"id": f"{name}#1", "state": state, "in_flight": 5, **more})


def test_a_row_has_the_pools_figures_and_the_requests_of_all_replicas() -> None:
    (row,) = engine_rows([document("a")], [report("r2", seen("a")), report("r3", seen("a"))])
    assert (row.held, row.capacity, row.unprefilled_tokens, row.claims) == (Amount(300, 3), Amount(1000, 8), 20, 2)
    assert (row.in_flight, row.elsewhere) == (11, "")


def test_another_incarnation_is_not_added() -> None:
    (row,) = engine_rows([document("a", id="a#2")], [report("r2", seen("a"))])
    assert row.in_flight == 1


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [
        ("ready", "starting", ""),
        ("ready", "draining", ""),
        ("ready", "down", "down at gpu-2 r2345678"),
        ("unreachable", "ready", "ready at gpu-2 r2345678"),
        ("down", "suspect", ""),
        ("ready", None, "not listed at gpu-2 r2345678"),
    ],
)
def test_a_replica_that_sees_an_engine_otherwise_is_named(own: str, theirs: str | None, said: str) -> None:
    others = [report("r23456789", *([] if theirs is None else [seen("a", theirs)]))]
    (row,) = engine_rows([document("a", state=own)], others)
    assert row.elsewhere == said


def test_many_replicas_are_named_in_a_few_words() -> None:
    others = [report(f"r{number}", seen("a", "down")) for number in range(9)]
    (row,) = engine_rows([document("a")], others)
    assert row.elsewhere == "down at gpu-2 r0, gpu-2 r1, gpu-2 r2 and 6 more"


def test_engine_lists_that_differ_are_reported_when_it_lasts() -> None:
    lists, own = EngineLists(), report("r1", seen("a"), seen("b"))
    lists.compare([report("r2", seen("a"), seen("b", "down")), report("r3", lists=False)], own, 100.0)
    assert lists.notices(200.0) == []
    other = report("r2", seen("a"), seen("c"), seen("b", "gone"))
    lists.compare([other], own, 200.0)
    assert lists.notices(200.0 + LASTING_S / 2) == []
    lists.compare([other], own, 202.0)
    assert lists.notices(212.0) == ["the engine list of replica r2 on gpu-2 lacks b and has also c, for 12 s"]
    lists.compare([report("r2", seen("a"), seen("b"))], own, 213.0)
    assert lists.notices(300.0) == []


def test_a_report_of_64_engines_travels_and_an_older_one_has_none() -> None:
    engines = [seen(f"10.0.{number}.{number}:8000") for number in range(64)]
    packed = pack(report("r1", *engines))
    assert len(packed) < 4096
    read = unpack(packed)
    assert read.engines == engines
    older = msgspec.structs.asdict(report("r1"))
    del older["engines"]
    assert msgspec.convert(older, ReplicaReport).engines is None
