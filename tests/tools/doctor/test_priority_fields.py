"""What is sent must be what the adapters send, or the doctor examines something else."""

from __future__ import annotations

import json

import pytest

from sidecar.apis import Api
from sidecar.engines import Engine, NoPriorityEngine
from sidecar.engines.base import Carrier
from sidecar.tools.doctor.target import ExaminedServer, levels_sent, ways_to
from tests.tools.emulator.emulated import DYNAMO, ENGINES, SGLANG, TRTLLM, VLLM


@pytest.mark.parametrize("tiers", [3, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_way_is_the_adapters_own(engine: type[Engine], tiers: int) -> None:
    way, dialect = ways_to(engine, None, tiers)[0], engine()
    for level, value in zip(levels_sent(tiers), way.values, strict=True):
        forward = dialect.forward(Api.CHAT, dialect.priority(level, tiers))
        sent = {name.encode(): text.encode() for name, text in way.headers(value).items()}
        assert sent == dict(forward.headers)
        member = way.members(value).get("priority")
        assert (None if member is None else json.dumps(member).encode()) == forward.member


@pytest.mark.parametrize(
    ("engine", "carrier", "titles"),
    [
        (VLLM, None, ["header x-vllm-priority", "body field priority"]),
        (VLLM, Carrier.BODY, ["body field priority", "header x-vllm-priority"]),
        (SGLANG, None, ["body field priority", "header x-override-priority"]),
        (TRTLLM, None, ["body field priority"]),
        (DYNAMO, None, ["header x-dynamo-request-priority", "body field nvext.agent_hints.priority"]),
        (NoPriorityEngine, None, []),
    ],
)
def test_the_other_ways_are_there_to_tell_who_is_to_blame(
    engine: type[Engine], carrier: Carrier | None, titles: list[str]
) -> None:
    assert [way.title for way in ways_to(engine, carrier, 3)] == titles


def test_a_nested_field_is_written_as_one() -> None:
    way = ways_to(DYNAMO, None, 3)[1]
    body = json.loads(ExaminedServer("http://engine", "m", {}).request("p", 4, way.members(way.values[0])).body)
    assert body["nvext"] == {"agent_hints": {"priority": 10}}
