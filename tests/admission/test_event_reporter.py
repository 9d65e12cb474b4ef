"""What an observer is told of one request."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.types import Receive, Scope, Send

from sidecar.admission.event_reporter import new_reporter
from sidecar.events import LONGEST_MODEL, Classified, FirstByte, Received
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from tests.support.middleware import App, Caller, Guarded, Recorder, chat, monitor

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


async def test_a_process_that_was_held_up_as_a_request_came_does_not_shift_its_times(tmp_path: Path) -> None:
    """The garbage collection of a large process takes half a second, now and then between two lines."""
    now_us, held_up_us = Pool(rules(tmp_path)).now_us, 5_000_000
    begun: list[Received] = []
    observer = SimpleNamespace(follows=lambda: True, received=begun.append)
    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    before_ns = time.time_ns()
    new_reporter(observer, scope, "r", now_us() - held_up_us, now_us, None)  # type: ignore[arg-type]
    (received,) = begun
    assert before_ns - 1000 <= received.wall_ns + held_up_us * 1000 <= time.time_ns()


async def test_the_first_byte_and_what_was_expected_are_told_and_no_model_name_of_a_megabyte(tmp_path: Path) -> None:
    guarded = Guarded(App(), rules(tmp_path))
    await Caller(guarded.sidecar, json.dumps(chat(model="m" * 2**20)).encode()).run()
    (story,) = guarded.recorder.stories
    story.check()
    assert story.one(FirstByte).status == 200
    classified = story.one(Classified)
    assert classified.expected is not None
    assert classified.model == "m" * LONGEST_MODEL


class OfFailures(Recorder):
    def follows(self) -> bool:
        return False


async def failing(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    raise RuntimeError("broken")


async def test_who_does_not_follow_requests_is_told_the_whole_of_those_that_fail(tmp_path: Path) -> None:
    for app, told in ((App(), []), (failing, [["Classified", "Admitted", "FirstByte", "Settled"]])):
        guarded = Guarded(app, rules(tmp_path))
        observer = OfFailures()
        monitor(guarded.sidecar, observer)
        with suppress(RuntimeError):
            await Caller(guarded.sidecar, json.dumps(chat()).encode()).run()
        assert [story.kinds for story in observer.stories] == told
        observer.check()
