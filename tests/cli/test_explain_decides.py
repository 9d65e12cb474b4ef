"""`sidecar explain` against the middleware: the same request gets the same tier, size and refusal from both."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.cli import main
from sidecar.events import Classified
from sidecar.policy.compiler import load
from tests.support.each import each
from tests.support.middleware import App, Caller, Guarded

KEY = "sk-acme"
POOL = """\
engine: {engine}
capacity: {{tokens: 2000, requests: 10}}
tiers:
  high: {{reserve: 20%, slo: {{ttft: 1s, tpot: 50ms}}}}
  normal: {{max_request_tokens: 700}}
  batch: {{limit: 50%, queue: {{max_requests: 5, max_wait: 30m}}}}
anonymous: {anonymous}
endpoints:
  /v1/chat/completions: {{}}
  /v1/completions: {{}}
  /v1/responses: {{}}
  /v1/messages: {{}}
  /v1/embeddings: {{}}
  /v1/batch/completions: {{tier: batch, forward_to: /v1/completions}}
  /paint: {{api: generic, tokens: {{base: 20, per_kilobyte: 400}}}}
tenants: tenants/*.yaml
"""
TENANT = 'tenant: acme\nkeys: ["sha256:{hash}"]\ntier: normal\nmax_tier: high\n'
LIMITS = "limits: {max_output_tokens: 100, tokens_per_minute: 3000, burst: 10s}\n"
POLICIES: Sequence[tuple[str, str]] = [
    (POOL.format(engine="tensorrt-llm", anonymous="batch"), LIMITS),
    (
        POOL.format(engine="vllm", anonymous="deny") + "background: hold\nunsized: hold\nmax_choices: 20\n",
        LIMITS + "over_limit: {downgrade: batch}\n",
    ),
    (
        POOL.format(engine="sglang", anonymous="normal").replace("10}", "10, learn: full}")
        + "max_body: 600B\nmax_upload: 5KiB\norder: gain\nsources: [engine, body, header, key]\n"
        + "engine_levels: {high: 10, normal: 5, batch: 0}\n",
        "",
    ),
]
Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder for each of `POLICIES`."""
    tenant = TENANT.format(hash=hashlib.sha256(KEY.encode()).hexdigest())
    folders = [tmp_path_factory.mktemp("policy") for _ in POLICIES]
    for folder, (pool, more) in zip(folders, POLICIES, strict=True):
        (folder / "tenants").mkdir()
        (folder / "policy.yaml").write_text(pool)
        (folder / "tenants" / "acme.yaml").write_text(tenant + more)
    return folders


def compare(policy: Path, path: str, pairs: Pairs, body: bytes) -> dict[str, Any]:
    """Sends it both ways, and returns what the middleware decides."""
    (policy / "body").write_bytes(body)
    headers = [argument for name, value in pairs for argument in ("--header", f"{name}: {value}")]
    target = policy / "found.json"
    code = main(
        ["explain", str(policy), "--path", path, "--body", str(policy / "body"), "--json", str(target), *headers]
    )
    explained = json.loads(target.read_text())
    decided = asyncio.run(_decided(policy, path, pairs, body))
    assert _summary(explained, decided) == decided
    assert code == ("code" in decided)
    return decided


def _summary(explained: dict[str, Any], of: dict[str, Any]) -> dict[str, Any]:
    """What the middleware says as well: of a request that is refused early it says less."""
    if "error" in explained:
        found = {"status": explained["error"]["status"], "code": explained["error"]["code"]}
    else:
        found = {"ignored": explained["ignored"]}
    if "tier" in of:
        found |= {name: explained[name] for name in ("tier", "clamped_from", "downgraded_from", "source")}
        found |= {name: explained["holds"][name] for name in ("tokens", "requests")}
    return found


async def _decided(policy: Path, path: str, pairs: Pairs, body: bytes) -> dict[str, Any]:
    guarded = Guarded(App(), load(policy))
    if not {"content-length", "transfer-encoding"} & {name for name, _ in pairs}:
        pairs = [*pairs, ("content-length", str(len(body)))]
    headers = [(name.encode(), value.encode()) for name, value in pairs]
    caller = Caller(guarded.sidecar, body, path=path, headers=headers)
    await caller.run()
    (story,) = guarded.recorder.stories
    found: dict[str, Any] = {}
    if caller.status == 200:
        ignored = dict(caller.sent[0]["headers"]).get(b"x-admission-ignored", b"").decode()
        found = {"ignored": ignored.split(", ") if ignored else []}
    else:
        error = caller.json["error"]
        found = {"status": caller.status, "code": error.get("code") or story.end.code}
    for made in (event for event in story.events if isinstance(event, Classified)):
        found |= {"tier": made.tier, "clamped_from": made.clamped_from, "downgraded_from": made.downgraded_from}
        found |= {"source": made.source, "tokens": made.tokens, "requests": made.requests}
    return found


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m"),
        "messages": st.sampled_from([[], "hi", [1], CHAT["messages"], [{"role": "user", "content": "a" * 3000}]]),
        "prompt": st.sampled_from(["hi", "", ["a", "b"], [1, 2, 3], [[1], [2, 3]], ["a"] * 9, 5]),
        "input": st.sampled_from(["hi", ["a"] * 9, [1] * 400, [{"role": "user", "content": "hi"}]]),
        "max_tokens": st.sampled_from([None, 0, 1, 50, 100, 101, 600, 5000, -1, 1.5, "9"]),
        "max_completion_tokens": st.sampled_from([0, 70, 101]),
        "max_output_tokens": st.sampled_from([0, 70, 101]),
        "n": st.sampled_from([1, 3, 9, 21, 0]),
        "best_of": st.sampled_from([2, 9]),
        "priority": st.sampled_from(["high", "batch", "urgent", 0, 0.7, 5, 10, -3, True]),
        "stream": st.booleans(),
        "background": st.booleans(),
        "session_params": st.just({"id": "s"}),
        "input_ids": st.just(list(range(300))),
    },
)
BODIES = st.one_of(
    MEMBERS.map(lambda members: json.dumps({**CHAT, **members}).encode()),
    MEMBERS.map(lambda members: json.dumps(members).encode()),
    st.sampled_from([b"", b"{", b"[]", b'{"model": "\xff"}', b'{"messages": [1], "max_tokens": 1, "max_tokens": 999}']),
)
HEADERS = st.lists(
    st.sampled_from(
        [
            ("x-priority", "high"), ("x-priority", "batch"), ("x-priority", "urgent"), ("x-priority", "0.9"),
            ("x-admission-max-wait", "3s"), ("x-admission-max-wait", "soon"), ("x-slo-ttft-ms", "2500"),
            ("x-slo-tpot-ms", "1"), ("x-vllm-priority", "-5"), ("content-encoding", "gzip"), ("via", "1.1 proxy"),
            ("content-length", "7000000000"), ("content-length", "many"), ("transfer-encoding", "chunked"),
            ("content-type", "multipart/form-data; boundary=x"), ("x-stainless-retry-count", "1"),
            ("authorization", "Basic YTpi"), ("x-api-key", KEY), ("x-api-key", "sk-no-one"),
        ]
    ),
    max_size=3,
)  # fmt: skip
KEYS = st.sampled_from([[], [("authorization", f"Bearer {KEY}")], [("authorization", "Bearer EMPTY")]])
PATHS = st.sampled_from(
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/paint",
     "/v1/batch/completions", "/v1//completions/"]
)  # fmt: skip


PLACES = st.integers(0, len(POLICIES) - 1)


@given(place=PLACES, path=PATHS, key=KEYS, headers=HEADERS, body=BODIES)
def test_whatever_is_sent_both_decide_the_same(  # noqa: PLR0917
    policies: list[Path], place: int, path: str, key: Pairs, headers: Pairs, body: bytes
) -> None:
    compare(policies[place], path, [*key, *headers], body)


ACME = [("authorization", f"Bearer {KEY}")]


@each(
    ("pairs", "body", "code"),
    [
        (ACME, {**CHAT, "max_tokens": 101}, "output_too_long"),
        (ACME, {**CHAT, "max_tokens": 100, "n": 6}, "tenant_limit"),
        (ACME, {**CHAT, "session_params": {"id": "s"}}, "unsized_prompt"),
        ([*ACME, *ACME], CHAT, "invalid_header"),
        ([*ACME, ("content-encoding", "br")], CHAT, "unsupported_encoding"),
        ([*ACME, ("content-length", "7000000000")], CHAT, "body_too_large"),
        (ACME, CHAT, None),
    ],
)
def test_what_only_the_whole_middleware_refuses(
    policies: list[Path], pairs: Pairs, body: dict[str, Any], code: str | None
) -> None:
    found = compare(policies[0], "/v1/chat/completions", pairs, json.dumps(body).encode())
    assert found.get("code") == code
