"""The real Dynamo as the tests start it: its router's queue on and off."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.real.lab import MODEL, dynamo

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("router_queue", [True, False])
def test_dynamo_answers_with_and_without_its_routers_queue(router_queue: bool) -> None:
    with dynamo(router_queue=router_queue) as url:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "the queue"}], "max_tokens": 4}
        sent = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-dynamo-request-priority": "5"},
        )
        with urllib.request.urlopen(sent, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
