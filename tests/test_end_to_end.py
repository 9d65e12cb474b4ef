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
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar import AdmissionMiddleware
from sidecar.engines import Dynamo, Sglang, TensorRtLlm, Vllm
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.member_events import Entered
from sidecar.proxy.proxy import ReverseProxy
from sidecar.scheduling.tickets import Ticket
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.spans.tracer import RequestTracer
from sidecar.tokens import Estimator
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.commands import address, command
from tests.support.late import openai
from tests.support.middleware import TestedMiddleware
from tests.support.serving import serving

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
    """A running engine, the sidecar before it, and both processes."""

    url: str
    admin_url: str
    engine: subprocess.Popen[str]
    sidecar: subprocess.Popen[str]

    def client(self, key: str, base: str = "/v1") -> openai.OpenAI:
        """A client that gives up at once: what it is refused, the test sees."""
        return openai.OpenAI(api_key=key, base_url=self.url + base, max_retries=0, timeout=90)

    def state(self) -> Any:
        with urllib.request.urlopen(f"{self.admin_url}/state", timeout=10) as response:
            return json.load(response)

    def until(self, *, leases: int, waiting: int = 0) -> None:
        """Waits until the pool holds just so many."""
        end_s = time.monotonic() + 60
        while (found := (self.state()["pool"]["leases"], self.state()["pool"]["waiting"])) != (leases, waiting):
            assert time.monotonic() < end_s, f"leases and waiting: wanted {(leases, waiting)}, got {found}"
            time.sleep(0.005)


@contextlib.contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    emulated = ("emulate", "--engine", "tensorrt-llm", "--port", "0", "--step-ms", "10", "--max-num-seqs", str(SLOTS))
    with command(*emulated) as engine:
        served = ("--upstream", address(engine), "--policy", str(write_policy(folder)))
        with command("serve", *served, "--port", "0", "--admin-port", "0") as sidecar:
            yield Stack(address(sidecar), address(sidecar), engine, sidecar)


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("policies")) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """One stack for all tests; none may leave anything in it."""
    yield shared_stack
    shared_stack.until(leases=0)


@contextlib.contextmanager
def filled(stack: Stack, key: str = RESEARCH, slots: int = SLOTS) -> Iterator[contextlib.ExitStack]:
    """Streams without an end in every slot; closing what is given frees them all."""
    with contextlib.ExitStack() as streams:
        client = streams.enter_context(stack.client(key))
        for _ in range(slots):
            stream = client.chat.completions.create(model="m", messages=HELLO, max_tokens=FOREVER, stream=True)
            next(iter(streams.enter_context(stream)))
        stack.until(leases=slots)
        yield streams


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


def test_a_stream_comes_chunk_by_chunk(stack: Stack) -> None:
    times_s, usage = [], None
    with stack.client(STANDARD) as client:
        stream = client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            times_s.append(time.monotonic())
            usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == 40
    # 40 tokens, a step of 10 ms each: what was held back would come in far fewer moments, or in one.
    assert times_s[-1] - times_s[0] > 0.3
    assert sum(later - earlier > 0.003 for earlier, later in pairwise(times_s)) > 20


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


@pytest.mark.long
def test_under_overload_high_is_answered_before_batch_that_came_first(stack: Stack) -> None:
    answered: list[str] = []

    def ask(key: str) -> None:
        # A slot that comes free late lets the last of high in together with the first of batch: they must not tie.
        tokens = 5 if key == INTERACTIVE else 20
        with stack.client(key) as client:
            answer = client.chat.completions.with_raw_response.create(model="m", messages=HELLO, max_tokens=tokens)
        answered.append(answer.headers["x-admission-tier"])
        waits_ms.append(int(answer.headers["x-admission-wait-ms"]))

    waits_ms: list[int] = []
    with filled(stack) as streams:
        threads = [threading.Thread(target=ask, args=(key,)) for key in [RESEARCH] * 6 + [INTERACTIVE] * 4]
        for count, thread in enumerate(threads, 1):
            thread.start()
            stack.until(leases=SLOTS, waiting=count)
        time.sleep(0.01)  # the last to come waits too: what is reported is whole milliseconds
        streams.close()
        for thread in threads:
            thread.join()
    assert answered == ["high"] * 4 + ["batch"] * 6
    assert min(waits_ms) > 0


def test_refusals_are_the_clients_own_exceptions(stack: Stack) -> None:
    with stack.client("sk-nobody") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.chat.completions.create(model="m", messages=HELLO)
    assert refused.value.code == "invalid_api_key"

    with stack.client(STANDARD) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=HELLO, extra_body={"priority": "hihg"})
        assert refused.value.code == "unknown_tier"
        assert "critical, high, normal, low, batch" in refused.value.message
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=HELLO, max_tokens=2_000_000)
        assert refused.value.code == "request_too_large"
        # Not ours: the engine's own refusal passes as it is.
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=HELLO, extra_body={"no_such_field": 1})
        assert "Extra inputs are not permitted" in refused.value.response.text


def test_a_pool_that_is_full_is_an_exception_that_says_when_to_come_again(stack: Stack) -> None:
    soon = {"x-admission-max-wait": "50ms"}
    with filled(stack) as streams, stack.client(RESEARCH) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="m", messages=HELLO, extra_headers=soon)
        assert (refused.value.status_code, refused.value.code) == (503, "queue_timeout")
        assert float(refused.value.response.headers["retry-after"]) >= 1

        waiting = [threading.Thread(target=_ask, args=(stack,)) for _ in range(6)]
        for thread in waiting:
            thread.start()
        stack.until(leases=SLOTS, waiting=6)
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="m", messages=HELLO)
        assert (refused.value.status_code, refused.value.code) == (503, "queue_full")
        streams.close()
        for thread in waiting:
            thread.join()


def _ask(stack: Stack) -> None:
    with stack.client(RESEARCH) as client:
        client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)


@pytest.mark.long
def test_a_client_that_leaves_in_mid_stream_frees_its_slot_at_the_engine(stack: Stack) -> None:
    with filled(stack) as streams:
        streams.close()
        stack.until(leases=0)
    # As many again run at once: the engine, too, has all its slots back.
    with filled(stack, INTERACTIVE):
        pass


@pytest.mark.long
def test_sigterm_refuses_the_new_finishes_the_running_and_ends_with_0(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack, stack.client(STANDARD) as running, stack.client(STANDARD) as late:
        stream = running.chat.completions.create(model="m", messages=HELLO, max_tokens=150, stream=True)
        chunks = iter(stream)
        next(chunks)
        assert late.models.list().data  # opens the connection on which it is refused
        stack.sidecar.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + 60
        while not stack.state()["draining"]:
            assert time.monotonic() < end_s
        with pytest.raises(openai.InternalServerError) as refused:
            late.chat.completions.create(model="m", messages=HELLO)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        rest = list(chunks)
        assert len(rest) >= 149
        assert rest[-1].choices[0].finish_reason == "length"
        assert stack.sidecar.wait(60) == 0
        assert stack.engine.poll() is None


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
async def test_the_trace_of_an_overload_says_what_the_scheduler_did(tmp_path: Path) -> None:
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


@pytest.mark.anyio
async def test_the_bars_of_a_trace_are_exactly_as_long_as_the_waits(tmp_path: Path) -> None:
    traces = await traced_overload(tmp_path, 60)
    for trace, expected in traces.expected.items():
        spans = traces.spans[trace]
        if "admission.queued" in spans:
            assert length_us(spans["admission.queued"]) == expected.queue_wait_us
            assert spans["admission.queued"].end_time == spans["engine"].start_time
        if "admission.starved" in spans:
            assert length_us(spans["admission.starved"]) == expected.starvation_us
            assert spans["admission.starved"].end_time == spans["admission.queued"].end_time


@pytest.mark.anyio
async def test_the_client_the_sidecar_and_the_engine_are_one_trace(tmp_path: Path) -> None:
    traces = await traced_overload(tmp_path, 20)
    assert len(traces.to_engine) == 20
    for traceparent in traces.to_engine:
        _, trace, parent, flags = traceparent.split("-")
        spans = traces.spans[trace]
        admission, engine = spans["admission"], spans["engine"]
        assert admission.parent is not None
        assert engine.parent is not None
        assert admission.context is not None
        assert engine.context is not None
        assert admission.parent.span_id == int(trace, 16)  # `overload` numbers both alike
        assert engine.parent.span_id == admission.context.span_id
        assert (parent, flags) == (f"{engine.context.span_id:016x}", "01")
