"""The priority that each engine gets: its direction, its range, its carrier, as ../shared/engines.md has them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission.forwarding import forwarded_body
from sidecar.apis import Api
from sidecar.engines import ENGINES, Dynamo, NoPriorityEngine, Sglang, Vllm
from sidecar.engines.base import Carrier, Engine, Forward
from sidecar.engines.registry import CLIENT_MEMBERS, client_headers, client_members
from sidecar.engines.tensorrt_llm import PriorityRoute, TensorRtLlm
from sidecar.payload.decode import decode
from sidecar.payload.edit import remove
from tests.support.each import each

CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, _ = Api
TRTLLM, VLLM, SGLANG, DYNAMO, NONE = TensorRtLlm, Vllm, Sglang, Dynamo, NoPriorityEngine
TALKING = (TRTLLM, VLLM, SGLANG, DYNAMO)
LADDERS = range(1, 21)


def dialect(engine: type[Engine], carrier: Carrier | None = None) -> Engine:
    return engine(carrier)


def ladder(engine: type[Engine], levels: int) -> list[float]:
    return [dialect(engine).priority(level, levels) for level in range(levels)]


@each(
    ("engine", "values"),
    [
        (TRTLLM, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (VLLM, [0, 10, 20, 30, 40]),
        (SGLANG, [8, 6, 4, 2, 0]),
        (DYNAMO, [20, 15, 10, 5, 0]),
    ],
)
def test_five_tiers_are_sent_as(engine: type[Engine], values: list[float]) -> None:
    assert ladder(engine, 5) == values


@each("levels", LADDERS)
@each("engine", TALKING)
def test_a_more_important_level_is_never_sent_as_a_less_important_one(engine: type[Engine], levels: int) -> None:
    sign = 1 if dialect(engine).more_important_is_higher else -1
    values = ladder(engine, levels)
    assert all(sign * better >= sign * worse for better, worse in pairwise(values))


@each(("engine", "most"), [(TRTLLM, 20), (VLLM, 20), (SGLANG, 11), (DYNAMO, 20)])
def test_levels_stay_apart_as_far_as_the_range_allows(engine: type[Engine], most: int) -> None:
    for levels in range(1, most + 1):
        assert len(set(ladder(engine, levels))) == levels


def test_the_directions_are_the_engines_own() -> None:
    assert [dialect(engine).more_important_is_higher for engine in TALKING] == [True, False, True, True]


@each("levels", LADDERS)
def test_every_value_is_in_its_engines_range(levels: int) -> None:
    assert all(0 <= value <= 1 for value in ladder(TRTLLM, levels))
    assert all(isinstance(value, int) for engine in (VLLM, SGLANG, DYNAMO) for value in ladder(engine, levels))
    assert max(ladder(SGLANG, levels)) - min(ladder(SGLANG, levels)) <= 10  # its preemption threshold
    assert min(ladder(DYNAMO, levels)) == 0  # its router takes negative values as 0
    assert max(ladder(DYNAMO, levels)) <= 30  # seconds of head start
    vllm = ladder(VLLM, levels)
    assert all(worse - better >= 2 for better, worse in pairwise(vllm))  # a tool's follow-up turn goes at minus 1


def test_the_only_tier_of_a_ladder_gets_the_engines_own_default() -> None:
    assert ladder(TRTLLM, 1) == [0.5]
    assert ladder(VLLM, 1) == [0]


HEADER, BODY, NOTHING = "header", "member", "nothing"
COVERAGE = {
    (TRTLLM, None): (BODY, BODY, NOTHING, NOTHING, NOTHING, NOTHING),
    (VLLM, None): (HEADER, HEADER, HEADER, HEADER, BODY, NOTHING),
    (VLLM, Carrier.HEADER): (HEADER, HEADER, HEADER, HEADER, BODY, NOTHING),
    (VLLM, Carrier.BODY): (BODY, BODY, BODY, HEADER, BODY, NOTHING),
    (SGLANG, None): (BODY, BODY, NOTHING, NOTHING, BODY, NOTHING),
    (SGLANG, Carrier.BODY): (BODY, BODY, NOTHING, NOTHING, BODY, NOTHING),
    (SGLANG, Carrier.HEADER): (HEADER, BODY, NOTHING, HEADER, BODY, NOTHING),
    (DYNAMO, None): (HEADER, HEADER, HEADER, HEADER, HEADER, HEADER),
    (NONE, None): (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
}
HEADERS = {VLLM: b"x-vllm-priority", SGLANG: b"x-override-priority", DYNAMO: b"x-dynamo-request-priority"}


def expected_forward(engine: type[Engine], way: str, priority: float) -> Forward:
    written = repr(priority).encode()
    if way == HEADER:
        return Forward(headers=((HEADERS[engine], written),))
    return Forward(member=written) if way == BODY else Forward()


@each(("engine", "carrier"), COVERAGE, ids=[f"{e.name}-{c and c.value}" for e, c in COVERAGE])
def test_a_priority_travels_where_each_endpoint_reads_it(engine: type[Engine], carrier: Carrier | None) -> None:
    spoken = dialect(engine, carrier)
    for api, way in zip(Api, COVERAGE[engine, carrier], strict=True):
        for level in range(5):
            priority = spoken.priority(level, 5)
            forward = spoken.forward(api, priority)
            assert forward == expected_forward(engine, way, priority)
            assert forward.is_sent == (way != NOTHING)


@pytest.mark.parametrize(("route", "is_sent"), [(PriorityRoute.HANDED_OVER, True), (PriorityRoute.NONE, False)])
def test_in_the_engines_own_process_no_body_is_rewritten_for_it(route: PriorityRoute, is_sent: bool) -> None:
    """And the values are the same: the caller that hands them over finds them in the grant."""
    for api in Api:
        forward = TensorRtLlm(route=route).forward(api, 0.75)
        assert (forward.headers, forward.member, forward.is_sent) == ((), None, is_sent)
    assert [TensorRtLlm(route=route).priority(level, 5) for level in range(5)] == ladder(TRTLLM, 5)


@each("engine", TALKING)
def test_a_member_is_the_json_of_its_value(engine: type[Engine]) -> None:
    for level in range(7):
        priority = dialect(engine).priority(level, 7)
        member = dialect(engine).forward(CHAT, priority).member
        assert member is None or json.loads(member) == priority


def test_engine_none_lets_the_app_read_the_level() -> None:
    assert ladder(NONE, 3) == [0, 1, 2]
    assert dialect(NONE).asked(decode(CHAT, b'{"messages":[1],"priority":5}'), {b"x-vllm-priority": b"1"}) is None


def test_every_header_that_an_engine_trusts_is_taken_from_clients() -> None:
    trusted = [
        *HEADERS.values(),
        b"x-dynamo-request-strict-priority",
        b"x-dynamo-meta-policy-class",
        b"x-override-rid",
        b"x-override-routed-dp-rank",
        b"x-tenant-id",
    ]
    harmless = [b"x-priority", b"authorization", b"x-request-id", b"x-vllm"]
    assert sorted(client_headers((*harmless, *trusted))) == sorted(trusted)


def test_every_member_that_an_engine_trusts_is_found_and_the_rest_of_nvext_left() -> None:
    body = b'{"messages":[1],"priority":1,"nvext":{"agent_hints":{"priority":1,"osl":2,"strict_priority":3},"x":1}}'
    assert client_members(decode(CHAT, body)) == [
        "priority",
        "nvext.agent_hints.priority",
        "nvext.agent_hints.strict_priority",
    ]
    for path in CLIENT_MEMBERS:
        body = remove(body, path)
    assert json.loads(body) == {"messages": [1], "nvext": {"agent_hints": {"osl": 2}, "x": 1}}


@given(sent=st.sampled_from([b"null", b"0.9", b"-7", b'"high"', b"1e400", b"{}", b'{"a":[1]}']), last=st.booleans())
def test_the_engine_hears_our_priority_whatever_a_client_wrote_in_its_place(sent: bytes, last: bool) -> None:
    parts = [b'"messages":[1]', b'"priority":%b' % sent]
    body = b"{%b}" % b",".join(parts if last else reversed(parts))
    forwarded = forwarded_body(body, decode(CHAT, body), Forward(member=b"0.25"))
    assert json.loads(forwarded, object_pairs_hook=list) == [("priority", 0.25), ("messages", [1])]


@each("sent", [None, "high", True, [], {}, "5"])
def test_what_the_engine_could_not_read_is_not_an_ask(sent: object) -> None:
    payload = decode(CHAT, json.dumps({"messages": [1], "priority": sent}).encode())
    for engine in (TRTLLM, VLLM, SGLANG):
        assert dialect(engine).asked(payload, {}) is None


@each("engine", ENGINES.values())
def test_nothing_sent_is_nothing_asked(engine: type[Engine]) -> None:
    assert dialect(engine).asked(decode(CHAT, b'{"messages":[1]}'), {b"x-priority": b"1"}) is None
