"""An observer that does not hear everything is told less of a whole answer, and of what it was expected to use."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sidecar.events import Classified, Expectation, ExpectedLength, FirstByte, Received
from sidecar.middleware.event_reporter import reporter_of
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from tests.support.middleware import App, Caller, Guarded, Story, chat

pytestmark = pytest.mark.anyio

RULES = """\
engine: none
capacity: {requests: 4, tokens: 10000}
tiers:
  critical: {preempt_after: 50ms}
  high: {}
  batch: {preemptible: true}
default_tier: high
anonymous: critical
sources: [header]
"""


def rules(tmp_path: Path) -> Policy:
    file = tmp_path / "policy.yaml"
    file.write_text(RULES)
    return load(file)


async def told(policy: Policy, *, everything: bool, tier: bytes = b"high", **members: Any) -> Story:
    """The story of one request to an idle pool."""
    guarded = Guarded(App(), policy)
    guarded.recorder.hears_everything = everything
    body = json.dumps(chat(**members)).encode()
    await Caller(guarded.sidecar, body, headers=[(b"x-priority", tier)]).run()
    (story,) = guarded.recorder.stories
    story.check()
    return story


async def test_a_process_that_was_held_up_as_a_request_came_does_not_shift_its_times(tmp_path: Path) -> None:
    """The garbage collection of a large process takes half a second, now and then between two lines."""
    now_us, held_up_us = Pool(rules(tmp_path)).now_us, 5_000_000
    begun: list[Received] = []
    observer = SimpleNamespace(received=begun.append, only_failures=lambda: False)
    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    before_ns = time.time_ns()
    reporter_of(observer, scope, {}, "r", now_us() - held_up_us, now_us, None)  # type: ignore[arg-type]
    (received,) = begun
    assert before_ns - 1000 <= received.wall_ns + held_up_us * 1000 <= time.time_ns()


async def test_the_first_byte_of_a_whole_answer_is_told_to_who_hears_everything(tmp_path: Path) -> None:
    policy = rules(tmp_path)
    assert (await told(policy, everything=True)).one(FirstByte).status == 200
    assert (await told(policy, everything=False)).kinds == ["Classified", "Admitted", "Settled"]


async def test_that_of_a_stream_and_of_a_request_that_could_be_preempted_is_told_to_all(tmp_path: Path) -> None:
    policy = rules(tmp_path)
    for story in (
        await told(policy, everything=False, stream=True),
        await told(policy, everything=False, tier=b"batch"),
    ):
        assert story.one(FirstByte).status == 200


async def test_who_does_not_hear_everything_is_told_the_same_length(tmp_path: Path) -> None:
    policy = rules(tmp_path)
    whole, length = [
        (await told(policy, everything=everything)).one(Classified).expected for everything in (True, False)
    ]
    assert type(whole) is Expectation
    assert type(length) is ExpectedLength
    assert msgspec.convert(whole, ExpectedLength, from_attributes=True) == length
