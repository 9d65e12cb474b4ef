"""The whole way: a client with a trace of its own, `sidecar serve`, an engine, and what an OTLP receiver was sent."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.compiler import shipped_policies
from tests.support.commands import address, command
from tests.support.in_process import emulated_engine
from tests.support.late import openai
from tests.support.nesting import refused_by_nesting
from tests.support.otlp import Received, otlp_over_grpc, otlp_over_http

INTERACTIVE, STANDARD, RESEARCH = "sk-demo-interactive", "sk-demo-standard", "sk-demo-research"
HELLO: Any = [{"role": "user", "content": "hello"}]
POLICY = """\
engine: {engine}
capacity: {{tokens: 10k, requests: 1}}
aging: {{promote_after: 5m, ceiling: normal}}
max_body: 4KiB
tiers:
  high: {{slo: {{starvation: 10s}}}}
  normal: {{}}
  batch: {{slo: {{starvation: 50ms}}, queue: {{max_requests: 1, max_wait: 30s}}}}
default_tier: normal
anonymous: deny
sources: [body, header, endpoint, key]
endpoints:
  /v1/chat/completions: {{}}
tenants: tenants/*.yaml
"""
RECEIVERS = {"http/protobuf": otlp_over_http, "grpc": otlp_over_grpc}
PARENT = "b7ad6b7169203331"


def trace_of(number: int) -> str:
    """The id of the trace that a client began itself."""
    return f"{number:032x}"


def write_policy(folder: Path, engine: str = "vllm", more: str = "") -> Path:
    (folder / "policy.yaml").write_text(POLICY.format(engine=engine) + more)
    shutil.copytree(shipped_policies() / "tenants", folder / "tenants")
    text = (folder / "tenants" / "interactive.yaml").read_text()
    (folder / "tenants" / "interactive.yaml").write_text(text.replace("max_tier: critical", "max_tier: high"))
    return folder


@dataclass
class Sidecar:
    """A running `sidecar serve`."""

    url: str
    admin_url: str
    process: subprocess.Popen[str]

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=30)

    def ask(self, key: str, trace: int, **asked: Any) -> Any:
        """One chat completion on a connection of its own."""
        with self.client(key) as client:
            return self.ask_on(client, trace, **asked)

    def ask_on(self, client: openai.OpenAI, trace: int, *, sampled: bool = True, tokens: int = 3, **more: Any) -> Any:
        """One chat completion in a trace of the client's own, with the trace's number as its request id."""
        more["extra_headers"] = {
            "traceparent": f"00-{trace_of(trace)}-{PARENT}-{int(sampled):02x}",
            "x-request-id": f"request-{trace}",
            **more.get("extra_headers", {}),
        }
        asked = {"model": "emulated", "messages": HELLO, "max_tokens": tokens, **more}
        answer = client.chat.completions.create(**asked)
        return list(answer) if asked.get("stream") else answer

    def refused(self, key: str, trace: int, **asked: Any) -> tuple[int, str]:
        """The status and the code with which it was refused."""
        with pytest.raises(openai.APIStatusError) as refused:
            self.ask(key, trace, **asked)
        return refused.value.status_code, str(refused.value.code)

    def until(self, *, leases: int, waiting: int) -> None:
        """Waits until the pool holds just so many."""
        end_s = time.monotonic() + 60
        while (found := self._pool()) != (leases, waiting):
            assert time.monotonic() < end_s, found
            time.sleep(0.005)

    def _pool(self) -> tuple[int, int]:
        pool = self._state()["pool"]
        return pool["leases"], pool["waiting"]

    def _state(self) -> Any:
        with urllib.request.urlopen(f"{self.admin_url}/state", timeout=10) as response:
            return json.load(response)

    def begin_to_end(self) -> None:
        """SIGTERM, up to where everything new is refused."""
        self.process.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + 60
        while not self._state()["draining"]:
            assert time.monotonic() < end_s

    def end(self) -> None:
        """Waits for its end, by which everything is sent."""
        assert self.process.wait(60) == 0, self.process.stderr and self.process.stderr.read()


@contextlib.contextmanager
def running_sidecar(
    folder: Path, upstream: str, collector: Received, protocol: str, *, more: str = "", **variables: str
) -> Iterator[Sidecar]:
    served = ("serve", "--upstream", upstream, "--policy", str(write_policy(folder, more=more)), "--port", "0")
    variables |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=lab",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_SERVICE_NAME": "front-door",
        "SIDECAR_ENGINE_CHECK": "off",  # an engine in this event loop answers nothing while the process starts
    }
    with command(*served, "--admin-port", "0", **variables) as process:
        yield Sidecar(address(process), address(process), process)


FILLER, STARVED, URGENT, UNKNOWN_KEY, OVER_CONTEXT, STREAMED = range(1, 7)


@dataclass
class Story:
    """What a client went through, and what the receiver was sent meanwhile."""

    received: Received
    answers: Mapping[int, Any]


def in_thread(target: Any, *arguments: Any, **named: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, kwargs=named)
    thread.start()
    return thread


def starvation(sidecar: Sidecar, answers: dict[int, Any]) -> None:
    """Batch waits behind batch, and is overtaken by high."""

    def ask(key: str, trace: int, **asked: Any) -> None:
        answers[trace] = sidecar.ask(key, trace, **asked)

    threads = [in_thread(ask, RESEARCH, FILLER, tokens=200)]  # it lasts until the others wait
    sidecar.until(leases=1, waiting=0)
    threads.append(in_thread(ask, RESEARCH, STARVED))
    sidecar.until(leases=1, waiting=1)
    threads.append(in_thread(ask, INTERACTIVE, URGENT, tokens=20))
    sidecar.until(leases=1, waiting=2)
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module", params=["http/protobuf", pytest.param("grpc", marks=pytest.mark.long)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Everything at once, as it takes a process: what was sent is looked at by the tests below."""
    emulated = ("--engine", "vllm", "--step-ms", "10", "--max-num-seqs", "1", "--context-tokens", "1000")
    answers: dict[int, Any] = {}
    with RECEIVERS[request.param]() as received, emulated_engine(*emulated) as engine:
        with running_sidecar(tmp_path_factory.mktemp("policies"), engine, received, request.param) as sidecar:
            starvation(sidecar, answers)
            usage = {"include_usage": True}
            answers[STREAMED] = sidecar.ask(STANDARD, STREAMED, stream=True, stream_options=usage, tokens=5)
            statuses = sidecar.refused("sk-nobody", UNKNOWN_KEY), sidecar.refused(STANDARD, OVER_CONTEXT, tokens=5_000)
            sidecar.begin_to_end()
            sidecar.end()
        assert [status for status, _ in statuses] == [401, 400]
        yield Story(received, answers)


@pytest.mark.long
def test_who_sends_is_said(story: Story) -> None:
    assert len(story.received.spans) > 10
    for span in story.received.spans:
        assert span.scope == "sidecar"
        assert span.resource["service.name"] == "front-door"
        assert span.resource["telemetry.sdk.language"] == "python"
    assert {headers["x-tenant"] for headers in story.received.headers} == {"lab"}


def test_the_trace_of_a_starved_request_is_exactly_these_spans(story: Story) -> None:
    spans = story.received.of(trace_of(STARVED))

    assert set(spans) == {"admission", "admission.queued", "admission.starved", "engine"}
    admission, queued, starved, engine = (
        spans[name] for name in ("admission", "admission.queued", "admission.starved", "engine")
    )
    assert [span.kind for span in (admission, queued, starved, engine)] == ["SERVER", "INTERNAL", "INTERNAL", "CLIENT"]
    assert admission.parent_id == PARENT
    assert {span.parent_id for span in (queued, engine)} == {admission.span_id}
    assert starved.parent_id == queued.span_id
    assert admission.start_ns < queued.start_ns < starved.start_ns < starved.end_ns
    assert starved.end_ns == queued.end_ns == engine.start_ns
    assert engine.end_ns == admission.end_ns
    ((name, first_byte_ns),) = engine.events
    assert name == "first_byte"
    assert engine.start_ns < first_byte_ns <= engine.end_ns
    assert {span.status for span in spans.values()} == {"UNSET"}
    # 20 tokens of the one that overtook it, at 10 ms each, and what was left of the one before.
    assert 0.15 < starved.length_s < queued.length_s < 10


def test_its_attributes_are_exactly_these(story: Story) -> None:
    spans, usage = story.received.of(trace_of(STARVED)), story.answers[STARVED].usage
    urgent_tokens = story.received.of(trace_of(URGENT))["admission"].attributes["admission.tokens.reserved"]
    filler_start_ns = story.received.of(trace_of(FILLER))["engine"].start_ns
    admission, queued = dict(spans["admission"].attributes), spans["admission.queued"]

    assert admission.pop("admission.queue_wait_s") == pytest.approx(queued.length_s, abs=2e-6)
    assert admission.pop("gen_ai.latency.time_in_queue") == pytest.approx(queued.length_s, abs=2e-6)
    assert admission.pop("admission.starvation_s") == pytest.approx(spans["admission.starved"].length_s, abs=2e-6)
    assert 3 < admission.pop("admission.tokens.reserved") < 100
    assert admission == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "admission.request_id": f"request-{STARVED}",
        "admission.tier": "batch",
        "admission.tenant": "research-batch",
        "admission.source": "key",
        "admission.decision": "admitted",
        "admission.outcome": "completed",
        "admission.output.source": "maximum",
        "admission.tokens.used": usage.total_tokens,
        "admission.level": 2,
        "admission.engine_priority": 20,
        "admission.served_ahead.high": urgent_tokens,
        "admission.starved_too_long": True,
        "admission.explanation": "1 request of tier high went ahead because high is more important",
    }
    assert filler_start_ns < queued.start_ns
    why = dict(queued.attributes)
    assert "1 request" in why.pop("admission.explanation")
    assert why == {"admission.tier": "batch", "admission.obstacle": "no_room"}
    assert spans["admission.starved"].attributes == {
        "admission.tier": "batch",
        "admission.served_ahead.high": urgent_tokens,
        "admission.explanation": "1 request of tier high went ahead because high is more important",
        "admission.overtaken_by.high": urgent_tokens,
        "admission.ahead.tokens.high": urgent_tokens,
        "admission.ahead.requests.high": 1,
        "admission.ahead.tenants.high": 1,
        "admission.ahead.because.high": "high is more important",
        "admission.ahead.rules.high": "level",
    }
    assert spans["engine"].attributes == {
        "gen_ai.provider.name": "vllm",
        "admission.served_by": "engine",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "emulated",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }


def test_figures_are_sent_as_numbers_and_each_name_has_one_type(story: Story) -> None:
    types: dict[str, set[type]] = {}
    for span in story.received.spans:
        for name, value in span.attributes.items():
            types.setdefault(name, set()).add(type(value))
    assert {name for name, found in types.items() if len(found) > 1} == set()
    numbers = {name: found.pop() for name, found in types.items()}
    assert {numbers[name] for name in numbers if name.endswith("_s")} == {float}
    counts = ("tokens", "status_code", "level", "ahead.high", "by.high", "tokens.high", "requests.high", "tenants.high")
    assert {numbers[name] for name in numbers if name.endswith(counts)} == {int}


def test_a_store_that_nests_names_takes_every_span_link_and_resource(story: Story) -> None:
    spans = story.received.spans
    sent = [each.attributes for span in spans for each in (span, *span.links)] + [span.resource for span in spans]
    assert [refused for names in sent if (refused := refused_by_nesting(names))] == []


@pytest.mark.long
def test_a_replica_that_is_killed_leaves_the_last_word_of_those_that_waited(tmp_path: Path) -> None:
    emulated = ("--engine", "vllm", "--step-ms", "100", "--max-num-seqs", "1", "--context-tokens", "1000")
    settings = {"more": "trace_waits: 200ms\n", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with (
        otlp_over_http() as received,
        emulated_engine(*emulated) as engine,
        running_sidecar(tmp_path, engine, received, "http/protobuf", **settings) as sidecar,
    ):

        def ask(key: str, trace: int, **asked: Any) -> None:
            with contextlib.suppress(openai.APIError):
                sidecar.ask(key, trace, **asked)

        threads = [in_thread(ask, STANDARD, FILLER, tokens=800)]
        sidecar.until(leases=1, waiting=0)
        threads.append(in_thread(ask, RESEARCH, STARVED))
        received.until(lambda received: len(received.spans) > 1)
        sidecar.process.kill()
        for thread in threads:
            thread.join()

    assert {(span.name, span.trace_id) for span in received.spans} == {("admission.waiting", trace_of(STARVED))}
    assert len({span.parent_id for span in received.spans}) == 1
    first, second, *_ = (span.attributes for span in sorted(received.spans, key=lambda span: span.start_ns))
    assert first["admission.request_id"] == f"request-{STARVED}"
    assert first["admission.queue_wait_s"] >= 0.2
    assert second["admission.queue_wait_s"] >= 0.4  # the second turn, however late the first one was
    assert second["admission.explanation"].startswith("the pool has no room: 1 of 1 requests are held")
