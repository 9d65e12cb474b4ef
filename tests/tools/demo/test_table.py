"""What a person reads after the demo."""

from __future__ import annotations

import re
from dataclasses import replace

from sidecar.tools.demo.figures import RunMeasurement
from sidecar.tools.demo.report import summary, table
from sidecar.tools.demo.runs import Sharing, shared
from tests.tools.demo.figures import three, tier


def test_the_table_has_a_line_for_every_run_and_tier() -> None:
    lines = table(three()).splitlines()
    assert len(lines) == 1 + 3 * 3
    assert lines[1] == "control: equal priority  (utilization 93%)"
    assert " ".join(lines[-2].split()) == "high 10 94% 0.20 / 0.40 / 0.60 0.20 / 0.40 / 0.60 0.00 / 0.00 / 0.00"
    assert len({len(line) for line in lines if not line.endswith(")")}) == 1


def test_replicas_are_named_with_their_store_but_not_with_its_password() -> None:
    text = table(three(), shared(Sharing(3, "redis://me:opensesame@cache")))
    assert "admission, 3 replicas through redis://me:***@cache:6379/0  (utilization 93%)" in text
    assert "opensesame" not in text + repr(Sharing(3, "redis://me:opensesame@cache"))


def test_what_failed_is_said_beside_its_run() -> None:
    assert "engine priority only  (utilization 93%, 3 failed and are in no percentile)" in table(three(failed=3))


def test_the_five_figures_are_a_line_each_with_a_column_for_each_run() -> None:
    said, again, empty, head, *lines = summary(three()).splitlines()
    assert f"{said} {again}".endswith("engine's own priority stops bulk work, and admission control does neither.")
    assert empty == ""
    assert head.split()[2:] == ["equal", "priority", "engine", "priority", "admission"]
    assert [re.split(" {2,}", line)[1:] for line in lines] == [
        ["93.4%", "93.4%", "93.4%"],
        ["-", "-", "-"],
        ["6.90 s", "0.30 s", "0.60 s"],
        ["20%", "0%", "6%"],
        ["-", "-", "-"],
    ]
    assert max(map(len, summary(three()).splitlines())) <= 120
    more = {"critical": tier(0.1, 0.0), "normal": tier(0.4, 0.0)}
    lines = summary([replace(run, tiers={**run.tiers, **more}) for run in three()]).splitlines()
    assert lines[5].split()[-6:] == ["0.30", "s"] * 3
    assert (lines[8][:28], lines[8].split()[-6:]) == ("the tier that pays (normal):", ["1.20", "s"] * 3)


def test_the_conclusion_claims_nothing_that_the_figures_do_not_show() -> None:
    unclear = three(batch_share=0.0)
    assert "In so short a run the three ways do not differ clearly." in summary(unclear)
    assert "did not get to run for 0.40 s" in summary([*unclear[:2], replace(unclear[2], stalled_s=0.4)])
    assert "Requests failed" in summary(three(failed=3))
    without_batch = [RunMeasurement(run.name, 1.0, 5, {"high": run.tiers["high"]}) for run in three()]
    assert "Requests failed" in summary(without_batch)
