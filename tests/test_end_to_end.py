"""The main job on real input: real processes, the real `openai` client, the keys of the example tenants.

First as an operator runs it: `sidecar emulate` and `sidecar serve`, each a process of its own. Then every engine behind
the proxy, and the trace, in this process, where a test can look inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar import AdmissionMiddleware
from sidecar.engines import Dynamo, Sglang, TensorRtLlm, Vllm
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.member_events import Entered
from sidecar.proxy.proxy import ReverseProxy
from sidecar.scheduling.tickets import Ticket
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.spans.tracer import RequestTracer
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.commands import address, command
from tests.support.late import openai
from tests.support.middleware import TestedMiddleware
from tests.support.serving import serving
from tests.telemetry.span_stories import parent_id, span_id

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
        with urllib.request.urlopen(f"{self.admin_url}/state", timeout=10) as response:
            return int(json.load(response)["pool"]["leases"])


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
        (STANDARD, {}, "normal", None),
        (RESEARCH, {}, "batch", None),
        (INTERACTIVE, {"extra_headers": {"x-priority": "critical"}}, "critical", None),
        (INTERACTIVE, {"extra_body": {"priority": "low"}}, "low", None),
        (INTERACTIVE, {"extra_body": {"priority": 0}}, "batch", None),
        (STANDARD, {"extra_body": {"priority": 1.0}}, "high", "critical"),
        (STANDARD, {"extra_headers": {"x-priority": "critical"}}, "high", "critical"),
        (RESEARCH, {"extra_headers": {"x-priority": "high"}}, "batch", "high"),
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
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2


def test_an_endpoint_may_have_a_tier_of_its_own(stack: Stack) -> None:
    with stack.client(INTERACTIVE, "/v1/batch") as client:
        answer = client.completions.with_raw_response.create(model="m", prompt="hello", max_tokens=3)
    assert answer.headers["x-admission-tier"] == "batch"
    assert answer.parse().choices[0].finish_reason == "length"


def test_who_has_no_key_is_anonymous(stack: Stack) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, "max_tokens": 2}).encode()
    asked = urllib.request.Request(f"{stack.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as response:
        assert response.headers["x-admission-tier"] == "low"


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


async def until(condition: Any) -> None:
    """Waits for it, at most 5 s."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.001)


# The trace

trace_of: contextvars.ContextVar[str] = contextvars.ContextVar("trace_of")


class Watched(Pool):
    """A pool that writes down who arrived and who was admitted, when and in which order, by the client's trace id."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.journal: list[tuple[str, str, int]] = []
        self.asks: dict[str, Any] = {}
        self._traces: dict[str, str] = {}
        submit, enter = self._member.submit, self._member.enter

        def arrived(ticket: Ticket, now_us: int) -> str:
            trace = self._traces[ticket.id] = trace_of.get()
            self.asks[trace] = {"tier": ticket.tier, "tokens": ticket.tokens}
            self.journal.append(("arrived", trace, now_us))
            return trace

        def submitted(ticket: Ticket, now_us: int) -> None:
            arrived(ticket, now_us)
            submit(ticket, now_us)

        def entered_at_once(ticket: Ticket, now_us: int) -> Any:
            if (held := enter(ticket, now_us)) is not None:
                self.journal.append(("admitted", arrived(ticket, now_us), now_us))
            return held

        self._member.submit = submitted  # type: ignore[method-assign]
        self._member.enter = entered_at_once  # type: ignore[method-assign]

    def _admit(self, entered: Entered, now_us: int) -> bool:
        self.journal.append(("admitted", self._traces[entered.lease.ticket.id], now_us))
        return super()._admit(entered, now_us)


@dataclass
class Waited:
    """How a request's wait went, in microseconds, by comparing it with every other."""

    queue_wait_us: int
    starvation_us: int
    served_ahead: dict[str, int]


def waited(journal: list[tuple[str, str, int]], asks: Mapping[str, Any], names: list[str]) -> dict[str, Waited]:
    """Brute force over the journal: nothing of the scheduler's own bookkeeping is used."""
    arrivals = {trace: at for at, (what, trace, _) in enumerate(journal) if what == "arrived"}
    admissions = {trace: at for at, (what, trace, _) in enumerate(journal) if what == "admitted"}
    found = {}
    for trace, arrival in arrivals.items():
        admission = admissions[trace]
        admitted_us = journal[admission][2]
        ahead = [other for other, at in admissions.items() if arrival < at < admission]
        later = [journal[admissions[other]][2] for other in ahead if arrivals[other] > arrival]
        served: Counter[str] = Counter()
        for other in ahead:
            served[names[asks[other]["tier"]]] += asks[other]["tokens"]
        wait_us = admitted_us - journal[arrival][2]
        found[trace] = Waited(wait_us, admitted_us - min(later, default=admitted_us), dict(served) if wait_us else {})
    return found


class Traced:
    """Sets `trace_of` for what is below: the trace id that the client sent."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        trace_of.set(headers.get(b"traceparent", b"--").decode().split("-")[1])
        await self.app(scope, receive, send)


class Engine:
    """An emulated engine that notes the traceparent of each request."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.traceparents: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.traceparents += [value.decode() for name, value in scope.get("headers", ()) if name == b"traceparent"]
        await self.emulator.app(scope, receive, send)


async def overload(url: str, count: int) -> None:
    """`count` requests of three tenants and four tiers, each with a trace of its own, faster than four slots serve."""
    kinds = [(RESEARCH, None), (STANDARD, None), (INTERACTIVE, None), (INTERACTIVE, "critical"), (STANDARD, "low")]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(number: int) -> None:
            key, tier = kinds[number % len(kinds)]
            headers = {
                "authorization": f"Bearer {key}",
                "traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01",
                **({} if tier is None else {"x-priority": tier}),
            }
            body = {"model": "m", "messages": HELLO, "max_tokens": 3 + number % 7, "stream": number % 2 == 0}
            async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                await response.read()

        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0.002 if number % 3 else 0.006)
        await asyncio.gather(*tasks)


@dataclass
class Traces:
    """What the trace of an overload shows, and what happened."""

    spans: dict[str, dict[str, ReadableSpan]]
    expected: dict[str, Waited]
    asks: dict[str, Any]
    to_engine: list[str]


async def traced_overload(folder: Path, count: int) -> Traces:
    path = write_policy(folder)
    path.joinpath("policy.yaml").write_text(
        path.joinpath("policy.yaml").read_text().replace("max_requests: 6", "max_requests: 1000")
    )
    policy = load(path)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    pool, engine = Watched(policy), Engine(emulator_of(policy.engine, SLOTS, step_s=0.005))
    sidecar = TestedMiddleware(
        engine,
        policy=policy,
        pool=pool,
        dialect=policy.engine(policy.carrier),
        estimator=Estimator(),
        observer=EventDispatcher(RequestTracer(provider), ()),
    )
    async with serving(Traced(sidecar)) as served:
        await overload(served.url, count)
    spans: dict[str, dict[str, ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        assert span.context is not None
        spans.setdefault(f"{span.context.trace_id:032x}", {})[span.name] = span
    names = [tier.name for tier in policy.tiers]
    return Traces(spans, waited(pool.journal, pool.asks, names), pool.asks, engine.traceparents)


def length_us(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1000)


@pytest.mark.anyio
async def test_the_trace_of_an_overload_is_one_with_the_clients_and_says_what_the_scheduler_did(tmp_path: Path) -> None:
    count = 120
    traces = await traced_overload(tmp_path, count)
    assert len(traces.spans) == len(traces.expected) == count
    assert sum(one.starvation_us > 0 for one in traces.expected.values()) > 20, "too little happened to show anything"
    assert any(one.queue_wait_us == 0 for one in traces.expected.values())

    for trace, expected in traces.expected.items():
        spans = traces.spans[trace]
        said = dict(spans["admission"].attributes or {})
        assert said["admission.queue_wait_s"] == expected.queue_wait_us / 1e6
        assert said.get("gen_ai.latency.time_in_queue", 0.0) == expected.queue_wait_us / 1e6
        assert said["admission.starvation_s"] == expected.starvation_us / 1e6
        assert said["admission.tokens.reserved"] == traces.asks[trace]["tokens"]
        ahead = {name.rpartition(".")[2]: n for name, n in said.items() if name.startswith("admission.served_ahead.")}
        assert ahead == expected.served_ahead
        assert ("admission.queued" in spans) == (expected.queue_wait_us > 0)
        assert ("admission.starved" in spans) == (expected.starvation_us > 0)
        if "admission.queued" in spans:
            assert length_us(spans["admission.queued"]) == expected.queue_wait_us
            assert spans["admission.queued"].end_time == spans["engine"].start_time
        if "admission.starved" in spans:
            assert length_us(spans["admission.starved"]) == expected.starvation_us
            assert spans["admission.starved"].end_time == spans["admission.queued"].end_time

    assert len(traces.to_engine) == count
    for traceparent in traces.to_engine:
        _, trace, parent, flags = traceparent.split("-")
        admission, engine = (traces.spans[trace][name] for name in ("admission", "engine"))
        assert parent_id(admission) == int(trace, 16)  # `overload` numbers both alike
        assert parent_id(engine) == span_id(admission)
        assert (parent, flags) == (f"{span_id(engine):016x}", "01")
