"""Replicas with different policies: reported when it lasts, counted and marked at once, forgotten when it is over."""

from __future__ import annotations

import msgspec

from sidecar.cluster.overview import LASTING_S, Generations
from sidecar.cluster.report import ReplicaReport, pack, unpack


def report(replica: str, generation: str, host: str = "box") -> ReplicaReport:
    return ReplicaReport(replica, host, 0, 0, generation)


def test_nothing_is_reported_of_replicas_that_run_the_same() -> None:
    generations = Generations()
    generations.compare([report("r2", "aa"), report("r3", "aa")], "aa", 100.0)
    assert (generations.notices("aa", 200.0), generations.count("aa")) == ([], 1)
    assert generations.running("r1", "aa") == {"aa": ["r1", "r2", "r3"]}


def test_a_difference_is_counted_at_once_and_reported_when_it_lasts() -> None:
    generations = Generations()
    generations.compare([report("r2-and-more", "bb")], "aa", 100.0)
    assert generations.count("aa") == 2
    assert generations.running("r1", "aa") == {"aa": ["r1"], "bb": ["r2-and-more"]}
    assert generations.notices("aa", 100.0 + LASTING_S / 2) == []
    generations.compare([report("r2-and-more", "bb")], "aa", 103.0)
    assert generations.notices("aa", 112.0) == [
        "replica r2-and-m on box runs policy generation bb, this one aa, for 12 s"
    ]


def test_a_roll_out_that_goes_on_is_no_lasting_difference() -> None:
    generations = Generations()
    generations.compare([report("r2", "bb")], "aa", 100.0)
    generations.compare([report("r2", "bb")], "bb", 104.0)  # this one has followed
    assert generations.notices("bb", 200.0) == []
    generations.compare([report("r2", "cc")], "bb", 201.0)
    assert generations.notices("bb", 203.0) == []
    assert generations.notices("aa", 300.0) == [], "what differed from another policy of ours"


def test_many_replicas_are_one_sentence_a_generation() -> None:
    generations = Generations()
    others = [report(f"r{number}", "bb") for number in range(2, 12)]
    generations.compare([*others, report("r20", "cc")], "aa", 100.0)
    assert generations.notices("aa", 110.0) == [
        "replica r2 on box and 9 more run policy generation bb, this one aa, for 10 s",
        "replica r20 on box runs policy generation cc, this one aa, for 10 s",
    ]
    generations.compare([], "aa", 111.0)
    assert (generations.notices("aa", 120.0), generations.count("aa")) == ([], 1)


def test_a_replica_that_does_not_say_what_it_runs_is_no_difference() -> None:
    older = msgspec.structs.asdict(report("r2", ""))
    del older["generation"]
    heard = msgspec.convert(older, ReplicaReport)
    assert unpack(pack(heard)) == heard
    generations = Generations()
    generations.compare([heard], "aa", 100.0)
    assert (generations.notices("aa", 200.0), generations.count("aa")) == ([], 1)
