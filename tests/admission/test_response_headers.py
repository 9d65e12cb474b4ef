"""Every answer names its request, so that a question about it can be answered; and says how it waited."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from sidecar.admission.responses import request_id
from tests.support.middleware import App, guarding, key, policy

pytestmark = pytest.mark.anyio


class WithItsOwnId(App):
    """As vLLM answers with --enable-request-id-headers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", b"cmpl-7"))
            await send(message)

        await super().__call__(scope, receive, named)


async def test_the_clients_own_id_comes_back() -> None:
    async with guarding(App()) as sidecar:
        answer = await sidecar.ask(None, "x-request-id: order-66")
        assert answer.headers["x-request-id"] == "order-66"
        assert sidecar.recorder.stories[0].received.request_id == "order-66"


async def test_a_request_without_one_is_given_one_and_no_two_the_same() -> None:
    async with guarding(App()) as sidecar:
        ids = {(await sidecar.ask()).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", found) for found in ids)


@pytest.mark.parametrize("value", [b"", b"a b", b"caf\xe9", b"x" * 129, b"a\tb"])
def test_an_id_that_would_not_stand_in_a_log_line_is_not_taken_over(value: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id({b"x-request-id": value}))


def test_an_id_may_have_128_characters() -> None:
    assert request_id({b"accept": b"*/*", b"x-request-id": b"x" * 128}) == "x" * 128


async def test_where_the_app_has_written_its_own_ours_has_another_name() -> None:
    async with guarding(WithItsOwnId()) as sidecar:
        answer = await sidecar.ask(None, "x-request-id: order-66")
    assert (answer.headers["x-request-id"], answer.headers["x-admission-id"]) == ("cmpl-7", "order-66")


async def test_a_refusal_names_its_request() -> None:
    async with guarding(App()) as sidecar:
        answer = await sidecar.ask(b"{", "x-request-id: order-66")
    assert (answer.status, answer.headers["x-request-id"]) == (400, "order-66")
    assert "x-admission-wait-ms" not in answer.headers, "it never asked for a place"


async def test_a_refusal_after_a_wait_says_how_long_it_was_and_how_much_of_it_starved() -> None:
    app = App(is_held=True)
    async with guarding(app, policy(requests="1")) as sidecar:
        running = asyncio.create_task(sidecar.ask())
        await sidecar.until(leases=1)
        batch = asyncio.create_task(sidecar.ask(None, key("nightly"), "x-admission-max-wait: 300ms"))
        await sidecar.until(waiting=1)
        high = asyncio.create_task(sidecar.ask(None, key("acme"), "x-priority: high"))
        await sidecar.until(waiting=2)
        app.release()
        await running
        answer = await batch
        app.release()
        assert (await high).status == 200
    assert (answer.status, answer.headers["x-admission-wait-ms"][0]) == (503, "3")
    timing = re.fullmatch(r"admission;dur=(3\d\d\.\d+), starved;dur=(\d+\.\d+)", answer.headers["server-timing"])
    assert timing
    assert 0 < float(timing[2]) < float(timing[1])
