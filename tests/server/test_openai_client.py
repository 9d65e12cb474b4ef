"""The middleware in an app as docs/tutorial-fastapi.md has it, and a tenant with OpenAI's client. Real processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.launched import running, write_app
from tests.support.http import fetch
from tests.support.late import openai
from tests.support.middleware import KEYS, write_policy
from tests.support.ports import free_ports

HELLO: Any = [{"role": "user", "content": "hello"}]


def page(port: int, path: str) -> str:
    return fetch(f"http://127.0.0.1:{port}{path}").text


def ask_often(client: Any) -> None:
    for _ in range(30):  # more than the burst has
        client.chat.completions.create(model="m", messages=HELLO)


def test_the_page_shows_what_the_client_did_and_the_client_is_told_all_it_needs(tmp_path: Path) -> None:
    write_app(tmp_path)
    write_policy(tmp_path, acme="limits: {requests_per_minute: 30, burst: 5s}\n")
    port = free_ports(2)
    with (
        running(tmp_path, "uvicorn", "main:app", "--port", str(port), SIDECAR_ADMIN_PORT=str(port + 1)) as server,
        openai.OpenAI(api_key=KEYS["acme"], base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client,
    ):
        server.until("Uvicorn running on")
        answer = client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
        assert (answer.headers["x-admission-tier"], answer.headers["x-ratelimit-limit-requests"]) == ("normal", "30")
        with pytest.raises(openai.RateLimitError, match="30 requests per minute") as refused:
            ask_often(client)
        assert refused.value.code == "tenant_limit"
        after_s = float(refused.value.response.headers["retry-after-ms"]) / 1000
        began_s = time.monotonic()
        streamed = client.with_options(max_retries=3).chat.completions.create(model="m", messages=HELLO, stream=True)
        next(iter(streamed))
        streamed.close()
        assert time.monotonic() - began_s > after_s / 2  # the client waited as it was asked, and got in
        with pytest.raises(openai.AuthenticationError, match="this API key is not known here"):
            client.with_options(api_key="EMPTY").chat.completions.create(model="m", messages=HELLO)

        assert "<!doctype html>" in page(port + 1, "/")
        assert answer.headers["x-request-id"] in page(port + 1, f"/requests/{answer.headers['x-request-id']}")
        assert 'admission_admitted_total{admission_pool="default",admission_tier="normal"}' in page(
            port + 1, "/metrics"
        )
        said = server.said
    assert "POST /v1/chat/completions" in said
    assert "GET /metrics" not in said  # the page asks every second
