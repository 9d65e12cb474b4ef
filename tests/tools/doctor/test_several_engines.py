"""Engines of one policy together: what no two emulated engines on loopback can show."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.engines import ENGINES
from sidecar.engines.base import Facts, Gauges
from sidecar.engines.discovery import Identity
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.tools.doctor.examination import Examination, Options
from sidecar.tools.doctor.recommendation import Recommendation
from sidecar.tools.doctor.several_engines import ExaminedEngine, Place, capacity, cells, find_places, findings
from sidecar.tools.doctor.survey import Survey

POLICY = """\
engine: vllm
tiers: {normal: {}}
engines:
  static: [{name: a, url: "http://a:8000"}, {name: b, url: "http://b:8000"}]
"""
LINE = Recommendation("capacity: {requests: 4}", "measured")


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    (tmp_path / "policy.yaml").write_text(POLICY)
    return load(tmp_path)


def examined(
    policy: Policy,
    *places: Place,
    number: int = 0,
    models: tuple[str, ...] = ("m",),
    gauges: Gauges | None = None,
    context: int | None = None,
    line: Recommendation | None = LINE,
) -> ExaminedEngine:
    """An engine of the policy, with what its pages said."""
    engine = policy.engines.static[number]
    identity = Identity(ENGINES["vllm"], "/v1/models", models[0] if models else None, context, models)
    survey = Survey(identity, ENGINES["vllm"], Facts(caches_prefixes=True), gauges or Gauges(kv_tokens=1000))
    return ExaminedEngine(
        engine,
        frozenset(places),
        Examination(
            options=Options(url=engine.url, headers={}),
            survey=survey,
            probed=None,
            conditions=(),
            findings=(),
            capacity=line,
            sends=None,
        ),
    )


def texts(policy: Policy, *engines: ExaminedEngine) -> list[tuple[str, bool]]:
    return [(one.text, one.is_broken) for one in findings(policy, engines)]


def test_a_name_of_several_servers_is_no_engine(policy: Policy) -> None:
    several = examined(policy, ("10.0.0.1", 8000, ""), ("10.0.0.2", 8000, ""))
    ((text, is_broken),) = texts(policy, several)
    assert is_broken
    assert text.startswith("http://a:8000 of the engine a leads to 2 servers (10.0.0.")


def test_a_server_with_addresses_of_both_families_is_one(policy: Policy) -> None:
    assert texts(policy, examined(policy, ("10.0.0.1", 8000, ""), ("fd00::1", 8000, ""))) == []


def test_two_base_paths_of_one_server_are_two_engines(policy: Policy) -> None:
    one, other = ("10.0.0.1", 8000, "/a"), ("10.0.0.1", 8000, "/b")
    assert texts(policy, examined(policy, one), examined(policy, other, number=1)) == []
    ((text, is_broken),) = texts(policy, examined(policy, one), examined(policy, one, number=1))
    assert is_broken
    assert text.startswith("the engines a and b are one server, 10.0.0.1 port 8000/a: ")


def test_a_capacity_that_no_one_reports_is_broken(policy: Policy) -> None:
    ((text, is_broken),) = texts(policy, examined(policy, gauges=Gauges()))
    assert is_broken
    assert text == "the capacity of the engine a is read from it, and it reports neither tokens nor requests"


def test_an_adapter_on_some_engines_alone_is_a_thing_to_do(policy: Policy) -> None:
    one, other = examined(policy, models=("m", "lora")), examined(policy, number=1)
    assert texts(policy, one, other) == [
        ("b of the pool's engines do not serve lora: a request for it gets a 404 there", False)
    ]
    silent = examined(policy, number=1, models=())
    assert texts(policy, one, silent) == [], "an engine that lists no model may serve any"


def test_one_line_of_capacity_is_given_where_it_is_true_of_all(policy: Policy) -> None:
    one, other = examined(policy), examined(policy, number=1)
    assert capacity([one, other]) == LINE
    assert capacity([one, examined(policy, number=1, line=Recommendation("capacity: {requests: 5}", ""))]) is None
    lost = ExaminedEngine(other.engine, frozenset(), None)
    assert capacity([one, lost]) is None
    assert cells([one, lost])[2] == ("b", "not examined", "-", "-", "-", "-", "-")


@pytest.mark.anyio
async def test_places_follow_the_resolver_the_scheme_and_the_path() -> None:
    assert await find_places("http://127.0.0.1/base/") == {("127.0.0.1", 80, "/base")}
    assert await find_places("https://127.0.0.1") == {("127.0.0.1", 443, "")}
    assert ("127.0.0.1", 8000, "") in await find_places("http://localhost:8000")
    assert await find_places("http://no-such-host.invalid:8000") == frozenset()
