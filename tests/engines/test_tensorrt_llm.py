"""TensorRT-LLM is asked whether it takes a priority before it is sent one: its older builds answer 400 to it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sidecar.admission.engine_pages import EnginePages
from sidecar.apis import Api
from sidecar.engines.pages import NoAnswer, Page
from sidecar.engines.tensorrt_llm import ASK_AFTER_FAILURE_S, ASK_AGAIN_S, ProbedTensorRtLlm
from tests.engines.test_reading import Written, emulated
from tests.tools.emulator.emulated import TRTLLM

pytestmark = pytest.mark.anyio


class Replaced:
    """An engine behind a network, which is another build from time to time, or away."""

    host = None

    def __init__(self, has_field: bool | None) -> None:
        self.has_field = has_field
        self.asked = 0

    async def get(self, path: str) -> Page:
        self.asked += 1
        if self.has_field is None:
            raise NoAnswer("away")
        return await EnginePages(emulated(TRTLLM, priority_field=self.has_field).app).get(path)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_build_with_the_field_is_sent_a_priority() -> None:
    dialect = ProbedTensorRtLlm(Replaced(True))
    await dialect.ask()
    assert dialect.forward(Api.CHAT, 1.0).member == b"1.0"
    assert not dialect.forward(Api.RESPONSES, 1.0).is_sent


async def test_a_build_without_the_field_is_sent_none_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    dialect = ProbedTensorRtLlm(Replaced(False), lambda: now_s[0])
    await dialect.ask()
    for _ in range(3):
        now_s[0] += ASK_AGAIN_S
        assert not dialect.forward(Api.CHAT, 1.0).is_sent
        await settled()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "has no priority field" in warnings[0]


async def test_an_engine_that_is_not_known_yet_is_sent_none_and_asked() -> None:
    engine, now_s = Replaced(None), [100.0]
    dialect = ProbedTensorRtLlm(engine, lambda: now_s[0])
    assert not dialect.forward(Api.CHAT, 1.0).is_sent
    await settled()
    asked = engine.asked
    for _ in range(50):
        dialect.forward(Api.CHAT, 1.0)
    await settled()
    assert engine.asked == asked, "not once a request"
    engine.has_field = True
    now_s[0] += ASK_AFTER_FAILURE_S
    dialect.forward(Api.CHAT, 1.0)
    await settled()
    assert dialect.forward(Api.CHAT, 1.0).is_sent


async def test_another_build_behind_the_same_address_is_noticed() -> None:
    engine, now_s = Replaced(True), [100.0]
    dialect = ProbedTensorRtLlm(engine, lambda: now_s[0])
    await dialect.ask()
    engine.has_field = None  # while it is away, what was known stays
    now_s[0] += ASK_AGAIN_S
    assert dialect.forward(Api.CHAT, 1.0).is_sent
    await settled()
    assert dialect.forward(Api.CHAT, 1.0).is_sent
    engine.has_field = False
    now_s[0] += ASK_AFTER_FAILURE_S
    dialect.forward(Api.CHAT, 1.0)
    await settled()
    assert not dialect.forward(Api.CHAT, 1.0).is_sent


async def test_an_app_that_is_not_trtllm_serve_is_sent_what_the_policy_says() -> None:
    dialect = ProbedTensorRtLlm(Written({"/openapi.json": '{"openapi": "3.1.0", "paths": {}}'}))
    await dialect.ask()
    assert dialect.forward(Api.CHAT, 1.0).is_sent


async def test_an_engine_that_hides_its_schema_is_sent_none_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    dialect = ProbedTensorRtLlm(Written({}))
    for _ in range(2):
        await dialect.ask()
    assert not dialect.forward(Api.CHAT, 1.0).is_sent
    assert [record.getMessage() for record in caplog.records] == [
        "it is not known whether tensorrt-llm takes a priority, and none is sent: GET /openapi.json answered 404"
    ]
