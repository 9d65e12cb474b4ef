"""An answer without usage: what is charged, learned and counted, as docs/write-a-policy.md says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.events import Settled
from sidecar.lengths.token_estimates import BYTES_PER_TOKEN
from tests.support.each import each
from tests.support.middleware import App, Caller, Guarded, chat, chunk, policy, start, whole_body

pytestmark = pytest.mark.anyio
KEY = [(b"authorization", b"Bearer sk-acme")]
PER_MINUTE, MOST = 6000, 3000
PROMPT = "word " * 40
"""50 tokens by their bytes."""
EVENTS = 20
_TEXTS: dict[str, Any] = {
    "chat/completions": {"choices": [{"delta": {"content": "word"}}]},
    "completions": {"choices": [{"text": "word"}]},
    "responses": {"type": "response.output_text.delta", "delta": "word"},
    "messages": {"type": "content_block_delta", "delta": {"text": "word"}},
}


def body(api: str, **fields: Any) -> bytes:
    prompt = "input" if api in ("responses", "embeddings") else "prompt" if api == "completions" else "messages"
    most = {} if api == "embeddings" else {"max_output_tokens" if api == "responses" else "max_tokens": MOST}
    said = [{"role": "user", "content": PROMPT}] if prompt == "messages" else PROMPT
    return json.dumps({"model": "m", prompt: said, **most, **fields}).encode()


class Engine(App):
    """Says no usage; `more` is sent before its end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads(await whole_body(receive))
        if not asked.get("stream"):
            await start(send)
            await chunk(send, b'{"id":"1","choices":[]}', more=False)
            return
        await start(send, content_type=b"text/event-stream")
        event = json.dumps(_TEXTS[scope["path"].removeprefix("/v1/")]).encode()
        for _ in range(EVENTS):
            await chunk(send, b"data: " + event + b"\n\n")
        await chunk(send, b"", more=False)


async def settled(api: str, **fields: Any) -> tuple[Guarded, Settled, int]:
    """The first request, and the tokens that its tenant has still of its limit."""
    guarded = Guarded(Engine(), policy(engine="vllm", acme=f"limits: {{tokens_per_minute: {PER_MINUTE}}}\n"))
    await Caller(guarded.sidecar, body(api, **fields), path=f"/v1/{api}", headers=KEY).run()
    after = Caller(guarded.sidecar, json.dumps(chat(max_tokens=1)).encode(), headers=KEY)
    await after.run()
    left = dict(after.sent[0]["headers"])[b"x-ratelimit-remaining-tokens"]
    return guarded, guarded.recorder.stories[0].one(Settled), int(left)


@each("api", [*_TEXTS, "embeddings"])
async def test_a_whole_answer_is_charged_the_most_that_it_may_have_used_and_teaches_nothing(api: str) -> None:
    guarded, end, left = await settled(api)
    most = 0 if api == "embeddings" else MOST
    assert (end.input_tokens, end.output_tokens) == (None, None)
    assert left == pytest.approx(PER_MINUTE - most - 60, abs=1000)  # of which 100 drain a second
    assert guarded.sidecar.estimator.bytes_per_token("acme", "m") == BYTES_PER_TOKEN
    assert guarded.sidecar.lease_sizes.document().learned == []


@each("api", [*_TEXTS])
async def test_a_stream_is_charged_its_prompt_by_its_bytes_and_its_events_and_teaches_its_length(api: str) -> None:
    guarded, end, left = await settled(api, stream=True)
    assert (end.input_tokens, end.output_tokens) == (None, None)
    assert end.tokens_used == pytest.approx(50 + EVENTS, abs=15)
    assert left == pytest.approx(PER_MINUTE - 100, abs=1000)
    assert guarded.sidecar.estimator.bytes_per_token("acme", "m") == BYTES_PER_TOKEN
    (learned,) = guarded.sidecar.lease_sizes.document().learned
    assert learned.samples == 1
