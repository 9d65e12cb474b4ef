"""What a person reads after the demo."""

from __future__ import annotations

from sidecar.tools.demo.figures import RunMeasurement
from sidecar.tools.demo.runs import Sharing, sentence, shared, table
from tests.tools.demo.figures import three


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
    assert "engine priority only  (utilization 93%, 3 failed)" in table(three(failed=3))


def test_the_sentence_has_the_figures_of_this_run() -> None:
    found = sentence(three())
    for part in (
        "0.20 s",
        "equal priority 2.30 s",
        "engine priority 0.10 s",
        "leaves 0%",
        "keeps 6%: its floor holds.",
    ):
        assert part in found


def test_the_sentence_claims_nothing_that_the_figures_do_not_show() -> None:
    assert "floor" not in sentence(three(batch_share=0.0))
    without_batch = [RunMeasurement(run.name, 1.0, 5, {"high": run.tiers["high"]}) for run in three()]
    assert "Too many requests failed" in sentence(without_batch)
