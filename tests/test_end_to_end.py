"""The main job on real input: real processes, the real `openai` client, the keys of the example tenants.

First as an operator runs it: `sidecar emulate` and `sidecar serve`, each a process of its own. Then every engine behind
the proxy, in this process, where a test can look inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.policy.compiler import load, shipped_policies
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.commands import address, command
from tests.support.http import fetch
from tests.support.late import openai
from tests.support.serving import serving
from tests.support.waiting import until

INTERACTIVE, STANDARD, RESEARCH = "sk-demo-interactive", "sk-demo-standard", "sk-demo-research"
HELLO: Any = [{"role": "user", "content": "hello"}]
SLOTS = 4
FOREVER = 100_000  # tokens: at 10 ms each, longer than any test
POOL = """\
engine: {engine}
capacity: {{tokens: 1M, requests: {requests}}}
aging: {{promote_after: 5m, ceiling: normal}}
tiers:
  critical: {{limit: 50%, always_first: true}}
  high: {{}}
  normal: {{}}
  low: {{}}
  batch: {{queue: {{max_requests: 6, max_wait: 60s}}}}
default_tier: normal
anonymous: low
sources: [{sources}]
endpoints:
  /v1/chat/completions: {{}}
  /v1/completions: {{}}
  /v1/responses: {{}}
  /v1/embeddings: {{}}
  /v1/batch/completions: {{tier: batch, forward_to: /v1/completions}}
tenants: tenants/*.yaml
"""


def write_policy(
    folder: Path,
    engine: str = "tensorrt-llm",
    requests: int = SLOTS,
    sources: str = "body, header, endpoint, key",
) -> Path:
    """A small pool, for the example tenants."""
    (folder / "policy.yaml").write_text(POOL.format(engine=engine, requests=requests, sources=sources))
    shutil.copytree(shipped_policies() / "tenants", folder / "tenants")
    return folder


# As processes


@dataclass
class Stack:
    """A running engine with the sidecar before it."""

    url: str
    admin_url: str

    def client(self, key: str, base: str = "/v1") -> openai.OpenAI:
        """A client that gives up at once: what it is refused, the test sees."""
        return openai.OpenAI(api_key=key, base_url=self.url + base, max_retries=0, timeout=90)

    def until_empty(self) -> None:
        end_s = time.monotonic() + 60
        while self._leases():
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def _leases(self) -> int:
        return int(fetch(f"{self.admin_url}/state").json["pool"]["leases"])


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    emulated = ("emulate", "--engine", "tensorrt-llm", "--port", "0", "--step-ms", "10", "--max-num-seqs", str(SLOTS))
    policy = str(write_policy(tmp_path_factory.mktemp("policies")))
    with command(*emulated) as engine:
        served = ("--upstream", address(engine), "--policy", policy, "--port", "0", "--admin-port", "0")
        with command("serve", *served) as sidecar:
            yield Stack(address(sidecar), address(sidecar))


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """One stack for all tests; none may leave anything in it."""
    yield shared_stack
    shared_stack.until_empty()


@pytest.mark.parametrize(
    ("key", "asking", "tier", "clamped_from"),
    [
        (INTERACTIVE, {}, "high", None),
        (RESEARCH, {}, "batch", None),
        (INTERACTIVE, {"extra_headers": {"x-priority": "critical"}}, "critical", None),
        (INTERACTIVE, {"extra_body": {"priority": 0}}, "batch", None),
        (STANDARD, {"extra_body": {"priority": 1.0}}, "high", "critical"),
        (STANDARD, {"extra_body": {"priority": "batch"}, "extra_headers": {"x-priority": "high"}}, "batch", None),
    ],
)
def test_the_tier_comes_from_the_key_or_from_what_the_client_asks_within_what_it_may(
    stack: Stack, key: str, asking: dict[str, Any], tier: str, clamped_from: str | None
) -> None:
    with stack.client(key) as client:
        answer = client.chat.completions.with_raw_response.create(model="m", messages=HELLO, max_tokens=2, **asking)
    assert answer.headers["x-admission-tier"] == tier
    assert answer.headers.get("x-admission-clamped-from") == clamped_from
    assert answer.headers["x-admission-wait-ms"] == "0"
    # The engine answers 400 to a `priority` that is no number from 0 to 1: what it was sent was ours.
    completion = answer.parse()
    assert completion.usage.completion_tokens == 2


def test_an_endpoint_may_have_a_tier_of_its_own(stack: Stack) -> None:
    with stack.client(INTERACTIVE, "/v1/batch") as client:
        answer = client.completions.with_raw_response.create(model="m", prompt="hello", max_tokens=3)
    assert answer.headers["x-admission-tier"] == "batch"
    assert answer.parse().choices[0].finish_reason == "length"


def test_who_has_no_key_is_anonymous(stack: Stack) -> None:
    answer = fetch(f"{stack.url}/v1/chat/completions", {"model": "m", "messages": HELLO, "max_tokens": 2})
    assert (answer.status, answer.headers["x-admission-tier"]) == (200, "low")


def test_every_api_of_the_client_works_and_what_is_not_guarded_passes(stack: Stack) -> None:
    with stack.client(STANDARD) as client:
        assert client.completions.create(model="m", prompt=["one", "two"], max_tokens=2).choices[1].text
        assert len(client.embeddings.create(model="m", input=["one", "two"]).data) == 2
        assert client.responses.create(model="m", input="hello", max_output_tokens=16).output_text
        assert [model.id for model in client.models.list()] == ["emulated"]


@pytest.mark.anyio
async def test_many_asynchronous_clients_at_once_all_get_their_whole_answers(stack: Stack) -> None:
    async with openai.AsyncOpenAI(api_key=STANDARD, base_url=f"{stack.url}/v1", max_retries=0, timeout=90) as client:

        async def streamed(tokens: int) -> int:
            stream = await client.chat.completions.create(
                model="m", messages=HELLO, max_tokens=tokens, stream=True, stream_options={"include_usage": True}
            )
            return [chunk.usage async for chunk in stream][-1].completion_tokens

        async def whole(tokens: int) -> int:
            answer = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=tokens)
            return answer.usage.completion_tokens

        sizes = list(range(2, 14))
        assert await asyncio.gather(*map(streamed, sizes), *map(whole, sizes)) == sizes * 2


# Every engine behind the proxy, in this process

STATED = {
    "x-vllm-priority": "-77",
    "x-override-priority": "77",
    "x-dynamo-request-priority": "77",
    "x-dynamo-request-strict-priority": "7",
}
HINTED: Mapping[type[Engine], Mapping[str, Any]] = {
    TensorRtLlm: {"priority": 0.77},
    Vllm: {"priority": -77, "nvext": {"agent_hints": {"priority": 77}}},
    Sglang: {"priority": 77, "nvext": {"agent_hints": {"priority": 77}}},
    Dynamo: {"priority": 77, "nvext": {"agent_hints": {"priority": 77, "strict_priority": 7}}},
}
"""What a client might send to get ahead at the engine: both are gone behind the sidecar."""
EXPECTED = {
    TensorRtLlm: {"critical": 1.0, "high": 0.75, "normal": 0.5, "batch": 0.0},
    Vllm: {"critical": 0, "high": 10, "normal": 20, "batch": 40},
    Sglang: {"critical": 8, "high": 6, "normal": 4, "batch": 0},
    Dynamo: {"critical": 20, "high": 15, "normal": 10, "batch": 0},
}


def emulator_of(engine: type[Engine], slots: int, step_s: float = 0.002) -> Emulator:
    steps = StepModel(max_sequences=slots, step_us=step_s * 1e6)
    return Emulator(EmulatorConfig(engine=engine, steps=steps, header_overrides=True))


@contextlib.asynccontextmanager
async def proxied(engine: type[Engine], folder: Path) -> AsyncIterator[tuple[Emulator, str]]:
    """An engine with one slot behind the proxy, whose pool lets ten requests go to it at once."""
    emulator = emulator_of(engine, 1)
    policy = load(write_policy(folder, engine.name, requests=10, sources="header, endpoint, key"))
    async with (
        serving(emulator.app) as upstream,
        serving(AdmissionMiddleware(ReverseProxy(upstream.url), policy)) as sidecar,
    ):
        yield emulator, sidecar.url


@pytest.mark.anyio
@pytest.mark.parametrize("engine", EXPECTED, ids=lambda engine: engine.name)
async def test_each_engine_serves_in_the_order_of_the_tiers_whatever_clients_tell_it(
    engine: type[Engine], tmp_path: Path
) -> None:
    askers = [(RESEARCH, None), (STANDARD, None), (INTERACTIVE, None), (INTERACTIVE, "critical")] * 2
    async with (
        proxied(engine, tmp_path) as (emulator, url),
        openai.AsyncOpenAI(api_key=RESEARCH, base_url=f"{url}/v1", max_retries=0) as client,
    ):

        async def ask(key: str, tier: str | None) -> tuple[str, str]:
            asked = {} if tier is None else {"x-priority": tier}
            answer = await client.with_options(api_key=key).chat.completions.with_raw_response.create(
                model="m", messages=HELLO, max_tokens=2, extra_headers=STATED | asked, extra_body=HINTED[engine]
            )
            return answer.headers["x-admission-tier"], answer.headers["x-admission-ignored"]

        first = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=FOREVER, stream=True)
        tasks = []
        for count, (key, tier) in enumerate(askers, 1):
            tasks.append(asyncio.create_task(ask(key, tier)))
            await until(lambda count=count: emulator.engine.waiting == count)
        await first.close()
        answers = await asyncio.gather(*tasks)

    tiers = ["critical"] * 2 + ["high"] * 2 + ["normal"] * 2 + ["batch"] * 2
    assert Counter(tier for tier, _ in answers) == Counter(tiers)
    log = sorted((line for line in emulator.engine.log if not line.aborted), key=lambda line: line.first_token_s or 0)
    assert [line.priority for line in log] == [EXPECTED[engine][tier] for tier in tiers]
    for _, ignored in answers:
        names = set(ignored.split(", "))
        assert names >= {*STATED, "priority"}
        assert ("nvext.agent_hints.priority" in names) == ("nvext" in HINTED[engine])
