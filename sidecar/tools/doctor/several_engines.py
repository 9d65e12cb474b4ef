"""Several engines of one policy: how they fit together, after each was examined by itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import urlsplit

from sidecar.policy.fleet import EngineAddress
from sidecar.policy.model import Policy
from sidecar.tools.doctor.examination import Examination, Finding
from sidecar.tools.doctor.recommendation import Recommendation

_DEFAULT_PORTS = {"http": 80, "https": 443}

Place = tuple[str, int, str]
"""An IP address, a port, and a base path."""


@dataclass(frozen=True, slots=True)
class ExaminedEngine:
    """An engine, where its name leads, and what was found there; None where it could not be examined."""

    engine: EngineAddress
    places: frozenset[Place]
    examination: Examination | None

    @property
    def name(self) -> str:
        """Its name in the policy."""
        return self.engine.name

    @property
    def models(self) -> frozenset[str]:
        """The models that it lists; empty where it lists none, or could not be examined."""
        return frozenset() if self.examination is None else frozenset(self.examination.survey.identity.models)


async def find_places(url: str) -> frozenset[Place]:
    """The places that an address leads to, by the system's resolver; empty where its name is not known."""
    parts = urlsplit(url)
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset((str(entry[4][0]), port, parts.path.rstrip("/")) for entry in found)


def findings(policy: Policy, engines: Sequence[ExaminedEngine]) -> Sequence[Finding]:
    """Where the engines do not fit together, those that break something first."""
    found = [*_addresses(engines), *_sizes(engines)]
    for pool in _pools(policy, engines):
        found += [*_models(policy, pool), *_context(pool)]
    found += _caches(policy, engines)
    return sorted(found, key=lambda finding: not finding.is_broken)


def capacity(engines: Sequence[ExaminedEngine]) -> Recommendation | None:
    """The `capacity` of all, for `engines` of the policy; None where they differ, or one has none."""
    given = [one.examination.capacity for one in engines if one.examination is not None]
    lines = {None if each is None else each.yaml for each in given}
    return given[0] if len(lines) == 1 and len(given) == len(engines) else None


def rows(engines: Sequence[ExaminedEngine]) -> Sequence[Mapping[str, Any]]:
    """A row for each engine, in JSON types. Sizes are those that the pool has; None is unbounded or not known."""
    return [_row(one) for one in engines]


def _row(one: ExaminedEngine) -> Mapping[str, Any]:
    if one.examination is None:
        return {"name": one.name, "verdict": None}
    read = one.examination.survey
    tokens, requests = one.engine.capacity.size(read.gauges.kv_tokens, read.gauges.max_running)
    return {
        "name": one.name,
        "verdict": one.examination.state.value,
        "engine": read.name,
        "model": read.identity.model,
        "tokens": tokens,
        "requests": requests,
        "prefix_cache": read.facts.caches_prefixes,
        "cached_tokens_reported": one.examination.reports_cached_tokens,
    }


def cells(engines: Sequence[ExaminedEngine]) -> list[tuple[str, ...]]:
    """The rows as text, with a head."""
    head = ("", "verdict", "model", "tokens", "requests", "prefix cache", "cached tokens")
    return [head, *(_cells(row) for row in rows(engines))]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["verdict"] is None:
        return (row["name"], "not examined", *["-"] * 5)
    amounts = ("unbounded" if row[key] is None else f"{row[key]:,}" for key in ("tokens", "requests"))
    cache = {True: "on", False: "off", None: "not known"}[row["prefix_cache"]]
    reported = {True: "reported", False: "not reported", None: "not known"}[row["cached_tokens_reported"]]
    return (row["name"], row["verdict"], row["model"] or "not known", *amounts, cache, reported)


def _pools(policy: Policy, engines: Sequence[ExaminedEngine]) -> Iterator[tuple[str | None, Sequence[ExaminedEngine]]]:
    """The engines of each model's pool, with its name; None where there is one pool for everything."""
    if not policy.models:
        yield None, engines
    for name, model in policy.models.items():
        yield name, [one for one in engines if model.engines is None or one.name in model.engines]


def _addresses(engines: Sequence[ExaminedEngine]) -> Iterator[Finding]:
    for one, other in combinations(engines, 2):
        if same := sorted(one.places & other.places):
            host, port, path = same[0]
            yield Finding(
                f"the engines {one.name} and {other.name} are one server, {host} port {port}{path}: its capacity "
                "counts twice, and it gets twice as many requests as it holds",
                "leave one of them out",
                is_broken=True,
            )
    for one in engines:
        fourth = [host for host, _, _ in one.places if ":" not in host]
        if len(several := fourth or [host for host, _, _ in one.places]) > 1:
            yield Finding(
                f"{one.engine.url} of the engine {one.name} leads to {len(several)} servers ({', '.join(several)}): "
                "they get the requests of one engine together, by chance",
                "write each with an address of its own, or `dns: {name: HOST:PORT}` in place of `static`",
                is_broken=True,
            )


def _sizes(engines: Sequence[ExaminedEngine]) -> Iterator[Finding]:
    for one in engines:
        if one.examination is None or not one.engine.capacity.is_read:
            continue
        gauges = one.examination.survey.gauges
        if one.engine.capacity.size(gauges.kv_tokens, gauges.max_running) == (None, None):
            yield Finding(
                f"the capacity of the engine {one.name} is read from it, and it reports neither tokens nor requests",
                f"write `capacity: {{requests: N}}` for {one.name}",
                is_broken=True,
            )


def _models(policy: Policy, pool: tuple[str | None, Sequence[ExaminedEngine]]) -> Iterator[Finding]:
    name, engines = pool
    listed = [one for one in engines if one.models]
    if name is not None:
        called = (name, *policy.models[name].aliases)
        for one in listed:
            if missing := [each for each in called if each not in one.models]:
                yield Finding(
                    f"the engine {one.name} is in the pool of {name}, and does not serve {' or '.join(missing)}: it "
                    f"lists {', '.join(sorted(one.models))}",
                    "serve it there (vLLM: --served-model-name, --lora-modules), or take the engine out of that pool",
                    is_broken=True,
                )
        return
    common = frozenset.intersection(*(one.models for one in listed)) if listed else frozenset()
    if listed and not common:
        served = "; ".join(f"{one.name} {', '.join(sorted(one.models))}" for one in listed)
        yield Finding(
            f"the engines of one pool serve no model in common: {served}",
            "write `models:` into the policy, with a pool for each: docs/tutorial-engines.md",
            is_broken=True,
        )
        return
    for model in sorted(frozenset().union(*(one.models for one in listed)) - common):
        lacking = [one.name for one in listed if model not in one.models]
        yield Finding(
            f"{', '.join(lacking)} of the pool's engines do not serve {model}: a request for it gets a 404 there",
            "serve it on all of them, or write `models:` into the policy",
        )


def _context(pool: tuple[str | None, Sequence[ExaminedEngine]]) -> Iterator[Finding]:
    found = {one.name: one.examination.survey.identity.context_tokens for one in pool[1] if one.examination is not None}
    known = {name: tokens for name, tokens in found.items() if tokens is not None}
    if len(set(known.values())) > 1:
        yield Finding(
            "the engines differ in the longest request that they take: "
            + ", ".join(f"{name} {tokens:,} tokens" for name, tokens in known.items()),
            "start them with the same (vLLM: --max-model-len): a longer one gets a 400 on some of them alone",
        )


def _caches(policy: Policy, engines: Sequence[ExaminedEngine]) -> Iterator[Finding]:
    assert policy.engines is not None
    without = [
        one.name
        for one in engines
        if one.examination is not None and one.examination.survey.facts.caches_prefixes is False
    ]
    if without and policy.engines.affinity.prefix:
        yield Finding(
            f"{', '.join(without)} have no prefix cache: requests are drawn to them in vain",
            "switch it on (vLLM: --enable-prefix-caching; SGLang: without --disable-radix-cache), or write "
            "`affinity: {prefix: false}`",
        )
