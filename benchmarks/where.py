"""Where admission's microseconds go: each part of the proxy's work on its own, on the benchmark's own request."""

from __future__ import annotations

import contextlib
import timeit
from collections.abc import Callable

from benchmarks.overhead_apps import ANSWER
from sidecar.apis import Api
from sidecar.classify import Asked, Classifier
from sidecar.engines.registry import client_headers
from sidecar.middleware.forwarding import forwarded_body, forwarded_headers
from sidecar.middleware.usage import UsageReader
from sidecar.payload.decode import decode
from sidecar.policy.compiler import load, shipped_policies
from sidecar.pools import Ask
from sidecar.pools.local import LocalPool
from sidecar.tokens import Estimator, tokens_to_hold

REPEATS, CALLS = 7, 2000


def where_it_goes(body: bytes, headers: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """Microseconds of each part, the least of several repeats."""
    policy = load(shipped_policies())
    dialect = policy.engine(policy.carrier)
    classifier, estimator, pool = Classifier(policy, dialect), Estimator(), LocalPool(policy)
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    pairs += [(b"content-length", b"%d" % len(body)), (b"host", b"127.0.0.1")]
    endpoint = policy.endpoints["/v1/chat/completions"]
    payload = decode(Api.CHAT, body)
    taken = client_headers(tuple(dict(pairs)))
    asked = Asked(endpoint, payload, dict(pairs), taken)
    tenant = classifier.tenant(asked.headers)
    forward = dialect.forward(Api.CHAT, dialect.priority(2, len(policy.tiers)))
    added = [(b"content-length", b"2000")]

    def understand() -> None:
        tokens_to_hold(decode(Api.CHAT, body), estimator.prompt_tokens(payload, tenant.name), 512)

    def classify() -> None:
        classifier.tenant(dict(pairs))
        classifier.classify(asked, tenant)

    def lease() -> None:
        with contextlib.suppress(StopIteration):  # what the local pool decides, it decides without waiting
            pool.enter(Ask(2, "standard", 1, 700, 1)).send(None)

    def forwarding() -> None:
        forwarded_body(body, payload, forward)
        forwarded_headers(pairs, taken, added)

    def usage() -> None:
        UsageReader().feed(ANSWER)

    return {
        "decode what decides, size the request": _least_us(understand),
        "find the tenant and the tier": _least_us(classify),
        "enter the pool, be admitted, settle": _least_us(lease),
        "write the priority, the headers": _least_us(forwarding),
        "read the answer's usage": _least_us(usage),
    }


def _least_us(part: Callable[[], None]) -> float:
    return min(timeit.repeat(part, number=CALLS, repeat=REPEATS)) / CALLS * 1e6
