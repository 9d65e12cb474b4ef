"""`sidecar doctor` against real engines: it knows nothing, and has to find out what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sidecar.tools.doctor.conditions import ConditionState
from sidecar.tools.doctor.examination import Examination, Options, examine
from sidecar.tools.doctor.report import report, steps
from sidecar.tools.doctor.speed_probe import measure
from sidecar.tools.simulate.model_fit import fit
from tests.real.lab import dynamo, vllm
from tests.tools.doctor.between import Edit, between, drops_header, negates_everything

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

W, B, U = ConditionState.WORKS, ConditionState.BROKEN, ConditionState.UNKNOWN


class Lab:
    """Two vLLMs and two Dynamos, with and without a queue that follows priority.

    Each starts when a test first asks for it: a test skips only where its own engine is not installed.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._urls: dict[str, str] = {}

    def url(self, name: str) -> str:
        """The address of an engine that answers."""
        if name not in self._urls:
            self._urls[name] = self._started(name)
        return self._urls[name]

    def _started(self, name: str) -> str:
        if name.startswith("vllm"):
            return self._stack.enter_context(vllm(scheduling=name.removeprefix("vllm "))).url
        return self._stack.enter_context(dynamo(router_queue=name == "dynamo"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack)


async def examined(url: str, **options: Any) -> Examination:
    return await examine(Options(url=url, headers={}, **options), lambda line: None)


def states(found: Examination) -> tuple[ConditionState, ...]:
    return tuple(condition.state for condition in found.conditions)


@pytest.mark.parametrize(
    ("name", "expected", "fix"),
    [
        ("vllm priority", (W, W, W, W), None),
        ("vllm fcfs", (U, B, W, U), "--scheduling-policy priority"),
        ("dynamo", (W, W, W, W), None),
        ("dynamo without a queue", (U, B, W, U), "--router-mode kv"),
    ],
)
async def test_an_engine_is_seen_through(
    name: str, expected: tuple[ConditionState, ...], fix: str | None, lab: Lab
) -> None:
    found = await examined(lab.url(name))
    assert states(found) == expected, report(found)
    assert found.state is (W if fix is None else B)
    assert fix is None or fix in steps(found)[0]


@pytest.mark.parametrize(
    ("name", "edit", "expected", "fix"),
    [
        ("vllm priority", drops_header("x-vllm-priority"), (B, W, W, W), "pass the header x-vllm-priority"),
        (
            "dynamo",
            drops_header("x-dynamo-request-priority"),
            (B, W, W, W),
            "pass the header x-dynamo-request-priority",
        ),
        ("vllm priority", negates_everything, (W, W, W, B), "itself serves lower numbers first"),
    ],
)
async def test_a_proxy_in_between_is_found_out(
    name: str, edit: Edit, expected: tuple[ConditionState, ...], fix: str, lab: Lab
) -> None:
    async with between(lab.url(name), edit=edit) as url:
        found = await examined(url)
    assert states(found) == expected, report(found)
    assert found.state is B
    assert fix in steps(found)[0]


@pytest.mark.parametrize("name", ["vllm priority", "vllm fcfs", "dynamo without a queue"])
async def test_too_little_load_is_not_called_broken(name: str, lab: Lab) -> None:
    found = await examined(lab.url(name), most=4)
    assert states(found) == (U, U, U, U), report(found)
    assert found.state is U
    assert "not enough load" in found.conditions[2].evidence


async def test_a_recommended_capacity_is_what_the_engine_runs(lab: Lab) -> None:
    found = await examined(lab.url("vllm priority"))
    assert found.capacity is not None
    assert found.capacity.yaml == "capacity: {from: engine, fraction: 95%, waiting: 2, requests: 6}"
    assert "524,288 tokens" in found.capacity.reason


@pytest.mark.parametrize("name", ["vllm priority", "dynamo"])
async def test_an_engine_model_is_fitted(name: str, lab: Lab) -> None:
    """How well depends on the machine: the engine and the test share its processors."""
    probe = await measure(Options(url=lab.url(name), headers={}), lambda line: None)
    fitted = fit(probe)
    assert fitted.model.step_us > 0
    assert fitted.model.kv_tokens > 0
    assert fitted.tpot.samples > 0
    assert fitted.tpot.p50 < 1
