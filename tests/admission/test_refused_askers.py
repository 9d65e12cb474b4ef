"""A request that is refused after its key was known counts for its tenant and tier, wherever that happens."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.telemetry.metrics import RequestMetrics
from tests.support.middleware import CHAT, Answer, App, chat, key, write_policy
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio

ACME, NIGHTLY = key("acme"), key("nightly")
RESPONSES = "/v1/responses"
MORE = "max_choices: 2\nunguarded: deny\npool: refused-askers\n"  # counters are those of a pool's name
REFUSED: list[tuple[str, str, Any, tuple[str, ...], str]] = [
    ("unsupported_encoding", CHAT, chat(), (ACME, "content-encoding: br"), "normal"),
    ("body_too_large", CHAT, b" " * 5000, (ACME,), "normal"),
    ("invalid_body", CHAT, b"[", (ACME,), "normal"),
    ("invalid_body", "/v1/batch/completions", b"[", (ACME,), "batch"),
    ("unknown_tier", CHAT, chat(priority="gold"), (ACME,), "normal"),
    ("background_not_allowed", RESPONSES, {"input": "a", "background": True}, (NIGHTLY,), "batch"),
    ("too_many_choices", CHAT, chat(n=3), (ACME, "x-priority: high"), "high"),
    ("unsized_prompt", RESPONSES, {"input": "a", "previous_response_id": "r"}, (ACME, "x-priority: high"), "high"),
    ("output_too_long", CHAT, chat(max_tokens=2000), (ACME, "x-priority: high"), "high"),
    ("invalid_header", CHAT, chat(), (ACME, "x-priority: high", "x-admission-max-wait: soon"), "high"),
    ("request_too_large", CHAT, chat(max_tokens=2_000_000), (NIGHTLY,), "batch"),
    ("queue_timeout", CHAT, chat(), (NIGHTLY, "x-admission-max-wait: 0s"), "batch"),
]
"""Code, path, body, headers, and the tier that it counts for."""
LIMITS = {"acme": "limits: {max_output_tokens: 1000}\n"}


async def test_every_refusal_after_the_key_counts_for_its_tenant_and_tier(tmp_path: Path) -> None:
    write_policy(tmp_path, MORE, max_body="4KiB", requests="1", **LIMITS)
    app = App(is_held=True)
    sidecar = AdmissionMiddleware(app, tmp_path, is_shown=True)
    async with serving(sidecar) as served:

        async def ask(path: str, body: Any, *headers: str) -> Answer:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            return Answer.parsed(await asyncio.wait_for(exchange(served.port, post(path, raw, *headers)), 60))

        running = asyncio.create_task(ask(CHAT, chat(), ACME))
        await until(lambda: len(app.seen) == 1)
        for code, path, body, headers, _ in REFUSED:
            answer = await ask(path, body, *headers)
            assert answer.code == code
        assert (await ask(CHAT, {}, "authorization: Bearer sk-nobody")).code == "invalid_api_key"
        app.release()
        assert (await running).status == 200
        expected = [(code, "acme" if ACME in headers else "nightly", tier) for code, _, _, headers, tier in REFUSED]
        overview = sidecar.observability._live._overview(time.time())
        shown = [(one.code, one.tenant, one.tier) for one in reversed(overview.refusals)]
        assert shown == [*expected, ("invalid_api_key", None, None)]
        (metrics,) = (one for one in sidecar.observability.observer.listeners if isinstance(one, RequestMetrics))
        counted = {(tier, code): count for (tier, code), count in metrics.counters.refused.items()}
        assert counted == {("", "invalid_api_key"): 1, **{(tier, code): 1 for code, _, tier in expected}}
        tenants = {name: counts.refused for name, counts in metrics.counters.tenants.series().items()}
        assert tenants == {name: sum(tenant == name for _, tenant, _ in expected) for name in ("acme", "nightly")}
        by_tier = {tier.tier: sum(bucket.refused for bucket in tier.recent) for tier in overview.tiers}
        assert by_tier == {name: sum(tier == name for *_, tier in expected) for name in by_tier}
