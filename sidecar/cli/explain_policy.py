"""Explanation of a policy's decision for one request, step by step, without sending the request."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sidecar.admission.intake import RequestIntake, SizedRequest, counted, sized_for
from sidecar.admission.policy_snapshot import KEY_HEADERS, policy_snapshot
from sidecar.admission.request_gain import GainMeter
from sidecar.admission.request_path import find_endpoint, is_model_list
from sidecar.admission.turn import Turn, no_room
from sidecar.admission.unguarded import treatment
from sidecar.apis import Api
from sidecar.cli.arguments import KEY_VARIABLE, key_given
from sidecar.cli.check_engines import with_engine_list
from sidecar.cli.explain_scheduling import (
    empty_pool,
    gain,
    gain_lines,
    guard_lines,
    guards,
    of_model,
    placement,
    placement_lines,
)
from sidecar.cli.output import CommandFailed, bounded, show
from sidecar.durations import policy_duration
from sidecar.engines.base import Engine
from sidecar.errors import AdmissionError
from sidecar.events import Headers
from sidecar.identity.classify import Asked, Classification, SourceAnswer, api_key
from sidecar.identity.tokens import Identities, is_token
from sidecar.lengths.estimator import LengthEstimator
from sidecar.lengths.lease_size import LeaseSizes
from sidecar.lengths.token_estimates import Estimator, NoTokenizer, TokenizerCounter
from sidecar.policy.choices import CapacitySource, Learn, Mode, Unguarded
from sidecar.policy.compiler import Loaded, load_files
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from sidecar.policy.rules import UNLIMITED
from sidecar.policy.size_limits import SizeLimits
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import digest
from sidecar.pools import Pool
from sidecar.pools.base import monotonic_us

SMALLEST = {
    Api.CHAT: b'{"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}',
    Api.COMPLETIONS: b'{"model": "m", "prompt": "Hello", "max_tokens": 16}',
    Api.RESPONSES: b'{"model": "m", "input": "Hello", "max_output_tokens": 16}',
    Api.MESSAGES: b'{"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}',
    Api.EMBEDDINGS: b'{"model": "m", "input": "Hello"}',
    Api.GENERIC: b'{"model": "m"}',
}
"""The body where none is given: the least that is a valid request of its kind."""

Found = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Returns 0 where the request would be let in, 1 where it would be refused or cannot be explained."""
    try:
        loaded, _ = with_engine_list(load_files(args.policy))
        loaded = Loaded(loaded.policy.at(now_s := time.time()), loaded.pool, loaded.tenants)
        key, origin = _key(args)
        body = None
        if args.body is not None:
            body = sys.stdin.buffer.read() if args.body == "-" else Path(args.body).read_bytes()
        counter = TokenizerCounter(loaded.policy.tokenizer) if loaded.policy.tokenizer else None
    except (PolicyError, NoTokenizer, ValueError) as refused:
        raise CommandFailed(str(refused)) from None
    except OSError as error:
        raise CommandFailed(f"{args.body}: cannot be read ({error.strerror})") from None
    keys = [] if key is None else [(b"authorization", b"Bearer " + key.encode("utf-8", "surrogateescape"))]
    explanation = RequestExplanation(loaded, Estimator(counter), args.client)
    found = asyncio.run(explanation.of(args.path, [*keys, *args.header], body))
    if origin == KEY_VARIABLE and "tenant" in found:
        found["tenant"]["by"] += f", from {origin}"
    hours, lines = loaded.policy.as_written.hours_at(now_s), [_text(found)]
    if hours is not None:
        found["hours"] = hours._asdict()
        lines += ["", str(hours)]
    is_refused = "error" in found or _is_refused_everywhere(found)
    return show(args.json, found, lambda: lines) or int(is_refused)


def _is_refused_everywhere(found: Found) -> bool:
    """True if a POST to an unguarded path is refused, wherever the middleware runs."""
    return not found["guarded"] and all(way["sending"] == "refused" for way in found["unguarded"])


def _key(args: argparse.Namespace) -> tuple[str | None, str]:
    """The key and its origin; none of the environment where a header carries one. Raises ValueError."""
    carries_one = {*KEY_HEADERS} & {name for name, _ in args.header}
    return key_given(args.key, args.key_file, variables=() if carries_one else (KEY_VARIABLE,))


class RequestExplanation:
    """Follows one request through the middleware's own intake and an empty pool, and keeps what it finds on the way,
    also where that ends in a refusal.
    """

    def __init__(self, loaded: Loaded, estimator: Estimator, client: str | None) -> None:
        self._loaded = loaded
        self._client = None if client is None else (client, 1)  # any port: it came over a connection
        self._policy: Policy = loaded.policy
        self._dialect: Engine = loaded.policy.engine(loaded.policy.carrier)
        identities = Identities()
        tokens = identities.verifier(loaded.policy.jwt)
        self._snapshot = policy_snapshot(loaded.policy, self._dialect, estimator, None, tokens=tokens)
        self._issuer_keys = identities.keys
        self._names = [tier.name for tier in loaded.policy.tiers]
        self._found: Found = {}

    async def of(self, target: str, pairs: Headers, body: bytes | None) -> Found:
        """All that is known of a request to a path, perhaps with a query, as JSON types."""
        path, _, text = target.partition("?")
        query = text.encode("utf-8", "surrogateescape")
        endpoint = find_endpoint(self._snapshot.endpoints, {"path": path})
        self._found = {"path": path, "guarded": endpoint is not None, "mode": self._policy.mode.value}
        if endpoint is None:
            self._found["guarded_paths"] = sorted(self._policy.endpoints)
            self._found["unguarded"] = self._find_unguarded(path)
            return self._found
        self._found |= {"api": endpoint.api.value, "forward_to": endpoint.forward_to, "body_given": body is not None}
        try:
            await self._follow(endpoint, pairs, query, body)
        except AdmissionError as error:
            self._found["error"] = {"status": error.status, "code": error.code, "message": error.message}
        return self._found

    def _smallest(self, api: Api, tenant: Tenant) -> bytes:
        """The body where none is given, for the first model that is known and that the tenant may use."""
        patterns = [pattern.replace("*", "") for pattern in tenant.models or ("m",)]
        model = next(iter((*self._snapshot.names.usable(tenant), *patterns)))
        return SMALLEST[api].replace(b'"m"', json.dumps(model).encode(), 1)

    def _find_unguarded(self, path: str) -> list[Found]:
        """Treatment of requests on an unguarded path, by where the middleware is mounted."""
        chosen, snapshot = self._policy.unguarded, self._snapshot
        lists_models = self._snapshot.names.are_listed_here and is_model_list(path)
        modes = [chosen] if chosen is not None else [Unguarded.DENY, Unguarded.GENERATING]
        return [
            {
                "mode": mode.value,
                "reading": _LISTS if lists_models else treatment(mode, snapshot, "GET", {"path": path}).value,
                "sending": treatment(mode, snapshot, "POST", {"path": path}).value,
            }
            for mode in modes
        ]

    async def _follow(self, endpoint: Endpoint, given: Headers, query: bytes, body: bytes | None) -> None:
        headers = dict(given)
        key = api_key(headers)
        if self._issuer_keys is not None and key is not None and is_token(key):
            await self._issuer_keys.fetch()
        pairs = list(given)
        if headers.keys().isdisjoint((b"content-length", b"transfer-encoding")):
            pairs.append((b"content-length", b"%d" % len(body or b"")))  # as clients send it
        headers = dict(pairs)
        now_us = monotonic_us()
        intake = RequestIntake(self._snapshot, endpoint, headers, now_us)
        intake.trace = self._note_sources
        try:
            intake.check_head(pairs, {"client": self._client, "query_string": query})
            assert intake.tenant is not None
            sent = self._smallest(endpoint.api, intake.tenant) if body is None else body
            request = intake.feed({"type": "http.request", "body": sent}, now_us)
        finally:
            if intake.tenant is not None:
                self._found["tenant"] = self._tenant(intake.tenant, self._named_by(headers, key))
            if intake.classification is not None:
                self._found |= self._classification(intake.classification)
        assert request is not None
        request = await counted(request, self._snapshot)
        policy = of_model(self._policy, request)
        pool = empty_pool(policy)
        if policy.engines is not None:
            request = replace(request, hits=())  # no engine has anything of its prompt yet
        sizes = LeaseSizes(policy.learn, pool.now_us, LengthEstimator())
        request = sized_for(pool, request, sizes, GainMeter(pool.now_us, sizes), self._snapshot.tier_names)
        self._note_size(request, policy)
        self._found["placement"] = placement(self._policy, policy, self._found["holds"])
        self._found["guards"] = guards(policy, pool, request.classification.level)
        request = await self._take_turn(request, pool)
        self._found["gain"] = gain(self._policy, request)
        self._found["engine"] = self._engine(endpoint.api, request)

    def _note_sources(self, asked: Asked, tenant: Tenant) -> None:
        """Notes each source's answer for the tier. The first that answers wins, unless one before it is refused."""
        answers = self._snapshot.classifier.answers(asked, tenant)
        first = next((answer for answer in answers if answer.refusal is not None or answer.level is not None), None)
        self._found["sources"] = [
            {**self._source(answer), "wins": answer is first and answer.refusal is None} for answer in answers
        ]

    def _named_by(self, headers: dict[bytes, bytes], key: bytes | None) -> str:
        """The source that named the tenant of a request."""
        gateway = self._policy.gateway
        if gateway is not None and gateway.tenant_header in headers and gateway.sent(self._client, ()):
            return f"the gateway's {gateway.tenant_header.decode('ascii')}"
        if key is None:
            return "no API key"
        holder = self._policy.tenants.get(digest(key))
        if holder is None:
            return "its token"
        return "its API key" if holder.key_name is None else f"its API key {holder.key_name}"

    def _tenant(self, tenant: Tenant, by: str) -> Found:
        return {
            "name": tenant.name,
            "by": by,
            "tier": self._names[tenant.level],
            "max_tier": self._names[tenant.max_level],
            "weight": tenant.weight,
            "models": tenant.models,
        }

    def _source(self, answer: SourceAnswer) -> Found:
        return {
            "source": answer.source.value,
            "statement": answer.statement,
            "value": answer.value if answer.statement else None,
            "tier": None if answer.level is None else self._names[answer.level],
            "refused": answer.refusal is not None,
        }

    def _classification(self, made: Classification) -> Found:
        clamped = made.clamped_from is not None
        return {
            "tier": self._names[made.level],
            "source": made.source.value,
            "clamped_from": self._names[made.clamped_from] if made.clamped_from is not None else None,
            "clamped_by": self._ceiling(made.tenant) if clamped else None,
            "downgraded_from": None if made.downgraded_from is None else self._names[made.downgraded_from],
            "ignored": list(made.ignored),
            "user": None if made.user is None else made.user.shown,
        }

    def _ceiling(self, tenant: Tenant) -> str:
        """The line of the policy that keeps a tenant from a better tier."""
        best = self._names[tenant.max_level]
        if tenant is self._policy.anonymous:
            return f"{self._loaded.place(('anonymous',)) or self._loaded.pool.file}: anonymous: {best}"
        for key in ("max_tier", "tier"):  # without a ceiling of its own, a tenant's tier is its ceiling
            place = self._loaded.place(("tenants", tenant.name, key))
            if place is not None and key in (self._loaded.tenants[tenant.name].data or {}):
                return f"{place}: {key}: {best}"
        return f"tenant {tenant.name}"

    async def _take_turn(self, request: SizedRequest, pool: Pool) -> SizedRequest:
        """Takes its turn in an empty pool. Returns the request as the pool charges it.

        Raises the pool's refusal, or that of a wait that no grant would end.
        """
        turn = Turn(pool, self._policy, request, request.ask())
        try:
            lease = await turn.enter()
        finally:
            request = turn.request
            self._found |= self._classification(request.classification)
        tier = self._policy.tiers[request.classification.level]
        self._found["longest_wait_s"] = longest_s = request.longest_wait_s(self._policy)
        if request.deadline_us is not None:
            rises_to = self._names[request.classification.best_level]
            left_s = round((request.deadline_us - pool.now_us()) / 1e6)
            self._found["deadline"] = {"wait_s": left_s, "rises_to": rises_to}
        self._found["timeouts"] = {**asdict(tier.timeouts), "streams": request.payload.stream}
        is_granted = lease.grant is not None
        await pool.close()
        if not is_granted and longest_s is not None:  # no engine is large enough, although all of them are idle
            raise no_room(pool, tier, longest_s)
        return request

    def _note_size(self, request: SizedRequest, policy: Policy) -> None:
        level, sizes = request.classification.level, SizeLimits(policy)
        tokens, requests = sizes.limits(level)
        payload = request.payload
        self._found["holds"] = {
            "tokens": request.tokens,
            "unsized": payload.unsized,
            "requests": request.requests,
            "prompt_tokens": request.prompt_tokens,
            "prompts": payload.prompts,
            "choices": payload.choices,
            "output_tokens": request.assumed_output,
            "output_by": "the tier's default" if payload.max_output_tokens is None else "the request",
            "output_cap": request.output_cap,
            "counted_by": "bytes" if self._snapshot.estimator.counter is None else "tokenizer",
            "learn": policy.learn.value,
        }
        if request.token_cost is not None:
            self._found["holds"]["counts"] = {"tokens": request.ask().counted_tokens, "cost": str(request.token_cost)}
        self._found["largest"] = {"tokens": bounded(tokens), "requests": bounded(requests)}
        self._found["largest_by"] = {
            "tokens": sizes.reason(level, tokens) if tokens < UNLIMITED else None,
            "requests": sizes.reason(level, requests, tokens=False) if requests < UNLIMITED else None,
        }
        self._found["capacity_from"] = CapacitySource.ENGINE.value if policy.reads_capacity else None

    def _engine(self, api: Api, request: SizedRequest) -> Found:
        priority = self._dialect.priority(request.classification.level, len(self._names))
        forward = self._dialect.forward(api, priority)
        members = {} if forward.member is None else {"priority": json.loads(forward.member)}
        if request.engine_model is not None:
            members["model"] = request.engine_model
        return {
            "name": self._policy.engine.name,
            "priority": priority if forward.is_sent else None,
            "headers": {name.decode(): value.decode() for name, value in forward.headers},
            "member": members or None,
        }


def _text(found: Found) -> str:
    """The explanation for people."""
    if not found["guarded"]:
        paths, is_chosen, lines = ", ".join(found["guarded_paths"]), len(found["unguarded"]) == 1, []
        for way in found["unguarded"]:
            where = f"unguarded: {way['mode']}" + ("" if is_chosen else f", the default {_MODES[way['mode']]}")
            lines.append(f"   {where}: GET {_TREATED[way['reading']]}; POST {_TREATED[way['sending']]}")
        return "\n".join([f"{found['path']} is not guarded.", *lines, f"The policy guards {paths}."])
    lines = [f"POST {found['path']}, read as {found['api']}" + ("" if found["body_given"] else ", with a small body")]
    for number, (title, details) in enumerate(_steps(found), 1):
        lines += ["", f"{number}. {title}", *details]
    if error := found.get("error"):
        lines += ["", f"Refused: {error['status']} {error['code']}", f"   {error['message']}"]
    else:
        lines += ["", f"It gets tier {found['tier']} and holds {found['holds']['tokens']:,} tokens."]
        if found["downgraded_from"] is not None:
            lines.append(f"Its tenant's limits allow no more: it is downgraded from {found['downgraded_from']}.")
    if found["mode"] != Mode.ENFORCE.value:
        lines.append(f"mode: {found['mode']}: the request passes, and this is what enforcing would do.")
    return "\n".join(lines)


def _steps(found: Found) -> Iterator[tuple[str, list[str]]]:
    """A title and lines for each step that the request came to."""
    if "tenant" in found:
        yield "The tenant", _who(found["tenant"])
    if "sources" in found:
        yield "Which tier: the sources in the policy's order; the first that answers wins", _which(found)
    if "holds" in found:
        yield "How much it holds until it is answered", _how_much(found)
    if found.get("placement") is not None:
        yield "Which engine it enters", placement_lines(found["placement"])
    if found.get("guards") is not None:
        yield "How full it may make the pool (hold)", guard_lines(found["guards"])
    if found.get("gain") is not None:
        yield "Its place among requests that wait (order: gain)", gain_lines(found["gain"], found["tier"])
    if "engine" in found:
        yield f"The priority sent to the engine ({found['engine']['name']})", _engine_lines(found)


_LISTS = "lists the models"
_MODES = {"deny": "before an engine's server", "generating": "mounted in an app"}
_TREATED = {
    "passes": "passes untouched",
    "needs a key": "passes, with a tenant's key where `anonymous` is deny",
    "refused": "is refused: 404 not_guarded",
    _LISTS: "is answered here with the policy's models, for a tenant's key",
}


def _who(tenant: Found) -> list[str]:
    same = tenant["tier"] == tenant["max_tier"]
    may = "may ask for nothing better" if same else f"may ask for up to {tenant['max_tier']}"
    models = [] if tenant["models"] is None else [f"   it may use the models {', '.join(tenant['models'])}"]
    return [f"   {tenant['name']}, by {tenant['by']}: tier {tenant['tier']}, {may}", *models]


def _which(found: Found) -> list[str]:
    lines, settled = [], False
    width = max(9, *(len(source["source"]) for source in found["sources"]))
    for source in found["sources"]:
        line = _source_line(source)
        if settled:
            line += "   (not asked: decided already)"
        elif source["wins"]:
            line += "   <- wins"
        settled = settled or source["wins"] or source["refused"]
        lines.append(f"   {source['source']:<{width}} {line}")
    if "tier" not in found:
        return lines
    if found["source"] == "default":
        lines.append("   none answers: the policy's default_tier decides")
    if found["clamped_from"]:
        lines.append(f"   {found['clamped_from']} is more than this tenant may have: clamped to {found['tier']}")
        lines.append(f"   by {found['clamped_by']}   (response: x-admission-clamped-from: {found['clamped_from']})")
    if found["ignored"]:
        names = ", ".join(found["ignored"])
        lines.append(f"   ignored: {names}   (response: x-admission-ignored)")
    if found["user"] is not None:
        lines.append(f"   user: {found['user'] or 'none is named'}")
    return lines


def _source_line(source: Found) -> str:
    if source["refused"]:
        return f"{source['statement']}: {source['value']}, which is no tier"
    statement = f"{source['statement']}: {source['value']}, " if source["statement"] else ""
    if source["tier"] is None:
        return f"{statement}which asks for no tier" if statement else "says nothing"
    return f"{statement}which means {source['tier']}" if statement else f"says {source['tier']}"


def _how_much(found: Found) -> list[str]:
    holds = found["holds"]
    each = f"{holds['output_tokens']:,} output" + ("" if holds["prompts"] == 1 else f" x {holds['prompts']} prompts")
    output = f" + {each} ({holds['output_by']})" if holds["output_tokens"] else ", no output"
    times = "" if holds["choices"] == 1 else f", x {holds['choices']} choices"
    how = (
        "by the policy's tokenizer"
        if holds["counted_by"] == "tokenizer"
        else "by its size, 4 bytes a token, until the engine's usage says better"
    )
    sequences, counted = holds["prompts"] * holds["choices"], "one for each sequence"
    if sequences > holds["requests"]:
        counted = f"of the {sequences:,} sequences the others wait in the engine"
    cap = holds["output_cap"]
    lines = [
        f"   {holds['tokens']:,} tokens: {holds['prompt_tokens']:,} prompt{output}{times}",
        *([] if cap is None else [f"   the engine is told {cap:,} as its maximum: the tenant's max_output_tokens"]),
        *_describe_cost(holds),
        f"   the prompt is counted {how}"
        if holds["unsized"] is None
        else f"   {holds['unsized']} cannot be sized: it holds the most that one request may (unsized: hold)",
        *_describe_learning(holds),
        f"   {holds['requests']:,} of the pool's requests: {counted}",
        f"   tier {found['tier']} accepts {_size_limit(found['largest'], found['largest_by'])}",
    ]
    if found["capacity_from"] is not None:
        lines.append("   less, where the engine says that it holds less (capacity: {from: engine})")
    if found.get("placement") is not None:
        lines.append("   and no more than one engine holds")
    if found.get("longest_wait_s") is not None:
        lines.append(f"   it waits {policy_duration(found['longest_wait_s'])} at most; then 503 queue_timeout")
    if (deadline := found.get("deadline")) is not None:
        lines.append(f"   by its deadline it waits {policy_duration(deadline['wait_s'])} at most; then 504 deadline")
        if deadline["rises_to"] != found["tier"]:
            lines.append(f"   as that comes near it rises, to {deadline['rises_to']} at most")
    if "timeouts" in found:
        lines.append(f"   {_timeouts(**found['timeouts'])}; then 504 engine_timeout")
    return lines


def _timeouts(first_byte_s: float, between_bytes_s: float, total_s: float, *, streams: bool) -> str:
    begins = f"begins within {policy_duration(first_byte_s)}, " if streams else ""
    return (
        f"its answer {begins}pauses for {policy_duration(between_bytes_s)} and takes {policy_duration(total_s)} at most"
    )


def _describe_cost(holds: Found) -> list[str]:
    """The count in its tenant's limits, where tokens are weighted."""
    if "counts" not in holds:
        return []
    tokens, cost = holds["counts"]["tokens"], holds["counts"]["cost"]
    return [f"   in its tenant's limits it counts for {tokens:,} until its usage is known (cost: {cost})"]


def _describe_learning(holds: Found) -> list[str]:
    """That a running sidecar may hold another size, where it learns output lengths."""
    if holds["learn"] == Learn.OFF.value or holds["unsized"] is not None or not holds["output_tokens"]:
        return []
    less = (
        "less"
        if holds["output_by"] == "the request"
        else "less, or more where answers are longer than the tier's default"
    )
    sentence = f"a running sidecar holds {less}, once it has learned how long such answers are"
    return [f"   {sentence} (capacity: {{learn: {holds['learn']}}})"]


def _engine_lines(found: Found) -> list[str]:
    engine = found["engine"]
    lines = [f"   header {name}: {value}" for name, value in engine["headers"].items()]
    for name, value in (engine["member"] or {}).items():
        lines.append(f'   body member "{name}": {json.dumps(value)}')
    if engine["priority"] is None:
        lines.append("   no priority: it has no place for one here; admission alone orders these requests")
    elif found["forward_to"]:
        lines.append(f"   on the path {found['forward_to']}")
    return lines


def _size_limit(largest: Found, by: Found) -> str:
    bounded = [f"{most:,} {dimension}" for dimension, most in largest.items() if most is not None]
    unbounded = [f"any number of {dimension}" for dimension, most in largest.items() if most is None]
    limit = ", and ".join([*unbounded, f"at most {' and '.join(bounded)}"] if bounded else unbounded)
    if by["tokens"] == by["requests"] is not None:
        return f"{limit}: {by['tokens']}"
    reasons = "; ".join(f"{dimension}: {reason}" for dimension, reason in by.items() if reason is not None)
    return f"{limit} ({reasons})" if reasons else limit
