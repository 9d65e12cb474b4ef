"""What a real tracing backend makes of our spans: an overload, the spans that Phoenix stored of it, and a picture.

    python -m benchmarks.tracing_backend [--mounted] [--picture FILE] [--json FILE] [--protocol P] [--keep]

`sidecar emulate`, `sidecar serve` and three clients with traces of their own run as processes and services of their
own, all of them sending to Phoenix. With `--mounted` an app with the middleware stands in place of the proxy. Batch
floods the engine; then high comes, for some seconds, faster than it is served, so that batch starves. The command fails
where what Phoenix has stored is not what happened. `--json` keeps the starved request's spans as a Collector's file
exporter writes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind

from benchmarks.otlp_file import OtlpFile, otlp_file
from benchmarks.phoenix import NotInstalled, Phoenix, Stored, phoenix, picture_of
from benchmarks.photograph import NoBrowser
from benchmarks.processes import command
from benchmarks.tracing_app import MODEL_CALL

POLICY = """\
engine: vllm
capacity: {tokens: 100k, requests: 4}
aging: {promote_after: 5m, ceiling: high}
tiers:
  high: {slo: {queue_wait: 2s}}
  batch: {slo: {starvation: 2s}}
default_tier: batch
tenants: tenants/*.yaml
endpoints:
  /v1/chat/completions: {}
"""
TIERS = {"nightly-eval": "batch", "chat-ui": "high", "support-bot": "high"}
"""Each tenant is a service of its own, and its name is its key."""
TOKENS = 50
"""At 20 ms each, a second for each request: 4 a second in all."""
FLOOD = 12
"""Batch requests at once: a third of them runs, a third has its turn next, a third starves."""
URGENT_FROM_S, URGENT_PER_S, URGENT_FOR_S = 1.5, 6.0, 4.0
"""High arrives half as fast again as it is served."""
STARVED_AT_LEAST_S = 2.0
EXPLANATION = "admission.explanation"
PARENTS = {"admission.queued": "admission", "admission.starved": "admission.queued", "engine": "admission"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the scenario."""

    at_s: float
    tenant: str


def scenario() -> Sequence[Asked]:
    """Batch first, then high, one after the other."""
    return [
        *(Asked(number * 0.02, "nightly-eval") for number in range(FLOOD)),
        *(
            Asked(URGENT_FROM_S + number / URGENT_PER_S, ("chat-ui", "support-bot")[number % 2])
            for number in range(int(URGENT_PER_S * URGENT_FOR_S))
        ),
    ]


# -- the servers and the clients


def run_overload(backend: Phoenix, protocol: str, *, is_mounted: bool = False) -> None:
    """Plays the scenario; when it returns, everything has been sent."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": backend.url if protocol == "http/protobuf" else backend.grpc_url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_METRICS_EXPORTER": "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        policy = write_policy(Path(folder))
        emulated = ("emulate", "--engine", "vllm", "--max-num-seqs", "4", "--step-ms", "20", "--port", "0")
        with (
            command(*emulated) as [engine],
            guarded(engine, policy, variables, is_mounted=is_mounted) as [address, *_],
            client_tracers(backend) as tracers,
        ):
            asyncio.run(play(scenario(), address, tracers))


def write_policy(folder: Path) -> Path:
    """The policy and its tenants."""
    (folder / "tenants").mkdir()
    for tenant, tier in TIERS.items():
        digest = hashlib.sha256(tenant.encode()).hexdigest()
        (folder / "tenants" / f"{tenant}.yaml").write_text(
            f'tenant: {tenant}\nkeys: ["sha256:{digest}"]\ntier: {tier}\n'
        )
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    return policy


def guarded(
    engine: str, policy: Path, variables: Mapping[str, str], *, is_mounted: bool
) -> AbstractContextManager[Sequence[str]]:
    """What the clients ask, before the engine: `sidecar serve`, or an app with the middleware. Its address is first."""
    if is_mounted:
        return command(engine, module="benchmarks.tracing_app", SIDECAR_POLICY=str(policy), **variables)
    served = ("serve", "--upstream", engine, "--policy", str(policy), "--port", "0", "--admin-port", "0")
    return command(*served, **variables)


@contextlib.contextmanager
def client_tracers(backend: Phoenix) -> Iterator[Mapping[str, trace.Tracer]]:
    """For each tenant the tracer of its service, with a process's own resource."""
    providers = {
        tenant: TracerProvider(resource=Resource.create({SERVICE_NAME: tenant}), shutdown_on_exit=False)
        for tenant in TIERS
    }
    for provider in providers.values():
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{backend.url}/v1/traces")))
    try:
        yield {tenant: provider.get_tracer("client") for tenant, provider in providers.items()}
    finally:
        for provider in providers.values():
            provider.shutdown()


async def play(asked: Sequence[Asked], address: str, tracers: Mapping[str, trace.Tracer]) -> None:
    """Sends every request when its time has come. Raises where one is not answered with 200."""
    async with aiohttp.ClientSession(address) as session:
        await asyncio.gather(*(_ask(one, session, tracers[one.tenant]) for one in asked))


async def _ask(asked: Asked, session: aiohttp.ClientSession, tracer: trace.Tracer) -> None:
    await asyncio.sleep(asked.at_s)
    span = tracer.start_span(asked.tenant, kind=SpanKind.CLIENT)
    context = span.get_span_context()
    headers = {
        "authorization": f"Bearer {asked.tenant}",
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
    }
    body = {"model": "emulated", "max_tokens": TOKENS, "messages": [{"role": "user", "content": "hello"}]}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        response.raise_for_status()
    span.end()


# -- what was stored


def problems(spans: Sequence[Stored]) -> list[str]:
    """What in the backend's store is not as it happened; empty where all of it is."""
    traces = by_trace(spans)
    found = [problem for one in traces.values() for problem in problems_of(one)]
    if len(traces) != len(scenario()):
        found.append(f"{len(traces)} traces of {len(scenario())} requests")
    bars = [one["admission.starved"] for one in traces.values() if "admission.starved" in one]
    longest_s = max((bar.length_s for bar in bars), default=0.0)
    if longest_s < STARVED_AT_LEAST_S:
        found.append(f"nothing starved for {STARVED_AT_LEAST_S:g} s; the longest bar has {longest_s:.2f} s")
    return found


def problems_of(one: Mapping[str, Stored]) -> list[str]:
    """The same of one request's trace: its tree, its bars, its attributes."""
    client = next((one[tenant] for tenant in TIERS if tenant in one), None)
    if client is None or not {"admission", "engine"} <= one.keys():
        return [f"a trace of {sorted(one)}"]
    admission, engine = one["admission"], one["engine"]
    said = admission.attributes
    wait_s, starvation_s = said["admission.queue_wait_s"], said["admission.starvation_s"]
    bars = {"admission.queued": wait_s, "admission.starved": starvation_s}
    expectations = {
        "admission hangs below the client's span": is_below(one, admission, client),
        "each bar hangs below its parent": all(
            one[name].parent_id == one[parent].span_id for name, parent in PARENTS.items() if name in one
        ),
        "a bar is there where it waited, or starved": all(
            (name in one) == (length > 0) for name, length in bars.items()
        ),
        "bars are as long as the waits": all(
            abs(one[name].length_s - length) < 1e-5 for name, length in bars.items() if name in one
        ),
        "bars end where the engine begins": all(
            abs(one[name].end_s - engine.start_s) < 1e-5 for name in bars if name in one
        ),
        "admission ends with the engine": abs(admission.end_s - engine.end_s) < 1e-5,
        "the app's own span hangs below the engine's": MODEL_CALL not in one or is_below(one, one[MODEL_CALL], engine),
        "the tenant and its tier are on it": (said["admission.tenant"], said["admission.tier"])
        == (client.name, TIERS[client.name]),
        "it was answered": said["http.response.status_code"] == 200 and said["admission.outcome"] == "completed",
        "who starved says who went ahead": "admission.starved" not in one
        or all(
            "of tier high went ahead" in span.attributes[EXPLANATION] for span in (admission, one["admission.starved"])
        ),
        "starved too long is marked": said.get("admission.starved_too_long", False)
        == (starvation_s > STARVED_AT_LEAST_S and said["admission.tier"] == "batch"),
        "usage is on the engine's span": engine.attributes["gen_ai.usage.output_tokens"] == TOKENS,
    }
    return [f"trace {admission.trace_id}: not so: {name}" for name, is_so in expectations.items() if not is_so]


def is_below(one: Mapping[str, Stored], lower: Stored, upper: Stored) -> bool:
    """Whether one span of a trace is a descendant of another. A server that traces itself has spans between them."""
    parents = {span.span_id: span.parent_id for span in one.values()}
    above = lower.parent_id
    while above not in {None, upper.span_id}:
        above = parents.get(above or "")
    return above is not None


def by_trace(spans: Sequence[Stored]) -> Mapping[str, Mapping[str, Stored]]:
    """Each trace's spans by name."""
    traces: dict[str, dict[str, Stored]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, {})[span.name] = span
    return traces


def starved(traces: Mapping[str, Mapping[str, Stored]]) -> Mapping[str, Stored]:
    """The trace in which a request starved longest. Raises ValueError where none did."""
    return max(
        (one for one in traces.values() if "admission.starved" in one),
        key=lambda one: one["admission.starved"].length_s,
    )


def table(one: Mapping[str, Stored]) -> str:
    """A trace for a terminal: each span's beginning and length, in seconds."""
    began_s = min(span.start_s for span in one.values())
    lines = [
        f"{span.name:20} {span.start_s - began_s:7.3f} {span.length_s:7.3f}"
        for span in sorted(one.values(), key=lambda span: (span.start_s, -span.length_s))
    ]
    return "\n".join([f"{'span':20} {'begins':>7} {'lasts':>7}", *lines])


def main() -> int:
    """Parses the command line and runs. Returns 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mounted", action="store_true", help="an app with the middleware, not the proxy")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also photograph the trace that starved longest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also keep its spans, a line of OTLP JSON an export")
    parser.add_argument("--protocol", choices=["http/protobuf", "grpc"], default="http/protobuf")
    parser.add_argument("--keep", action="store_true", help="leave Phoenix running until Enter is pressed")
    args = parser.parse_args()
    if args.protocol == "grpc" and (args.json or args.mounted):
        parser.error("--json and --mounted need http/protobuf")
    try:
        with phoenix() as backend, otlp_file(backend.url) as kept:
            run_overload(replace(backend, url=kept.url), args.protocol, is_mounted=args.mounted)
            return _look(backend, kept, args)
    except (NotInstalled, NoBrowser) as missing:
        print(f"tracing_backend: {missing}", file=sys.stderr)
        return 1


def _look(backend: Phoenix, kept: OtlpFile, args: argparse.Namespace) -> int:
    spans = backend.settled_spans(max(kept.spans, 3 * len(scenario())))
    traces = by_trace(spans)
    print(f"Phoenix stored {len(spans)} spans in {len(traces)} traces. The one that starved longest:\n")
    worst = starved(traces)
    print(table(worst))
    found = problems(spans)
    print("\n" + ("\n".join(found) if found else "All of them are as it happened."))
    trace_id = worst["admission"].trace_id
    page = backend.page_of(trace_id)
    if args.json is not None:
        args.json.write_text("".join(f"{line}\n" for line in kept.lines_of(trace_id)))
    if args.picture is not None:
        args.picture.write_bytes(asyncio.run(picture_of(page, "admission.starved", "went ahead")))
    if args.keep:
        input(f"\n{page}\nEnter ends Phoenix. ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
