"""One way through: whatever is sent, every way into a pool reads, sizes and refuses it alike, in the same words.

The middleware enforces, `mode: observe` says what enforcing would do, `sidecar explain` says it beforehand, a lease
from Python asks for the same, and `sidecar simulate` plays it. Each is compared in what it can say: the dry run and the
simulation have no words, a lease has no body.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission.controller import AdmissionController, Monitor, Services
from sidecar.admission.request_path import by_path, find_endpoint
from sidecar.cli.explain_policy import RequestExplanation
from sidecar.errors import AdmissionError
from sidecar.events import Classified, Observed, Refused, Settled, Verdict
from sidecar.fleet.models import ModelsController, serve_models
from sidecar.leases import Admission
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.choices import Mode
from sidecar.policy.compiler import Loaded, load_files
from sidecar.policy.fleet import offered
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.engines import EngineOffer
from sidecar.pools.limits_pool import LimitsPool
from sidecar.scheduling.rate_limit import RateLimiter
from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import SimulatedEngines, VirtualLoop
from sidecar.tools.simulate.product import ProductAdmission
from sidecar.tools.step_model.model import EngineModel
from tests.fuzz.corpus import HTTP, names
from tests.fuzz.requests import BODIES as FUZZED_BODIES
from tests.fuzz.requests import mutated, scopes
from tests.support.each import each
from tests.support.middleware import App, Caller, Recorder, TestedMiddleware
from tests.support.virtual_time import run_virtually, virtual_now_us

KEY = "sk-acme"
ACME = [(b"authorization", b"Bearer " + KEY.encode())]
POOL = """\
engine: {engine}
tiers:
  high: {{reserve: 20%, slo: {{ttft: 1s, tpot: 50ms}}}}
  normal: {{max_request_tokens: 700, queue: {{max_wait: 20s}}}}
  batch: {{limit: 50%, queue: {{max_requests: 5, max_wait: 30m}}}}
anonymous: {anonymous}
endpoints:
  /v1/chat/completions: {{}}
  /v1/completions: {{}}
  /v1/responses: {{}}
  /v1/messages: {{}}
  /v1/embeddings: {{}}
  /v1/batch/completions: {{tier: batch, forward_to: /v1/completions}}
  /paint: {{api: generic, tokens: {{base: 20, per_kilobyte: 400}}, cost: {{member: paid}}}}
tenants: tenants/*.yaml
"""
ONE_ENGINE = "capacity: {tokens: 2000, requests: 10}\n"
ENGINES = """\
engines:
  static:
    - {name: a, url: http://a, capacity: {tokens: 1200, requests: 3}}
    - {name: b, url: http://b, capacity: {tokens: 600, requests: 9}}
    - {name: c, url: http://c, capacity: {tokens: 90}}
  prefill: 50
"""
TENANT = 'tenant: acme\nkeys: ["sha256:{hash}"]\ntier: normal\nmax_tier: high\n'
LIMITS = "limits: {max_output_tokens: 100, tokens_per_minute: 3000, burst: 10s}\n"
POLICIES: Sequence[tuple[str, str]] = [
    (POOL.format(engine="tensorrt-llm", anonymous="batch") + ONE_ENGINE, LIMITS),
    (
        POOL.format(engine="vllm", anonymous="deny")
        + ONE_ENGINE
        + "background: hold\nunsized: hold\nmax_choices: 20\nforward_key: true\n",
        LIMITS + "over_limit: {downgrade: batch}\n",
    ),
    (
        POOL.format(engine="sglang", anonymous="normal")
        + ONE_ENGINE.replace("10}", "10, learn: full}")
        + "max_body: 600B\nmax_upload: 5KiB\norder: gain\nsources: [engine, body, header, key]\n"
        + "engine_levels: {high: 10, normal: 5, batch: 0}\n"
        + "gateway: {tenant_header: x-tenant, tier_header: x-asks, addresses: [10.0.0.0/8]}\n",
        "",
    ),
    (POOL.format(engine="vllm", anonymous="normal").replace("max_requests: 5, ", "max_requests: 0, ") + ENGINES, ""),
    (
        POOL.format(engine="vllm", anonymous="normal")
        + ENGINES
        + "models: {m: {engines: [a, c], aliases: [lora]}, q: {engines: [b]}}\n",
        LIMITS,
    ),
]
ANSWER = b'{"usage": {"prompt_tokens": 7, "completion_tokens": 5}, "paid": 33}'
PLACES = st.integers(0, len(POLICIES) - 1)
Pairs = list[tuple[bytes, bytes]]
Said = dict[str, Any]


class Sent(NamedTuple):
    """A request as a server hands it over."""

    path: str
    pairs: Pairs
    body: bytes
    query: bytes = b""
    client: str | None = None


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Loaded]:
    """`POLICIES`, read."""
    tenant, loaded = TENANT.format(hash=hashlib.sha256(KEY.encode()).hexdigest()), []
    for pool, more in POLICIES:
        folder = tmp_path_factory.mktemp("policy")
        (folder / "tenants").mkdir()
        (folder / "policy.yaml").write_text(pool)
        (folder / "tenants" / "acme.yaml").write_text(tenant + more)
        loaded.append(load_files(folder))
    return loaded


# -- the five ways


class Sidecar:
    """The controller of a policy, in virtual time: of its pool, or the front of its models' pools."""

    def __init__(self, policy: Policy) -> None:
        self.recorder, self.observed = Recorder(), list[Observed]()
        self._allowances, self._estimator = RateLimiter(), Estimator()
        self.controller: AdmissionController = self._front(policy) if policy.models else self._of_one(policy)

    def _of_one(self, policy: Policy) -> AdmissionController:
        return TestedMiddleware(
            App(answer=ANSWER),
            policy=policy,
            pool=self._pool(policy),
            dialect=policy.engine(policy.carrier),
            estimator=self._estimator,
            observer=self.recorder,
            observed=self.observed.append,
        )

    def _front(self, policy: Policy) -> AdmissionController:
        limits = LimitsPool(policy, self._allowances)
        limits.now_us = virtual_now_us
        controllers = {name: self._of_one(policy.of_model(name)) for name in policy.models}
        services = Services(
            app=App(answer=ANSWER),
            pool=limits,
            dialect=policy.engine(policy.carrier),
            estimator=self._estimator,
            monitor=lambda _: Monitor(self.recorder, self.observed.append),
        )
        return ModelsController(services, policy, controllers=controllers, counts_apart=False)

    def _pool(self, policy: Policy) -> Pool:
        if policy.engines is None:
            return Pool(policy, virtual_now_us, allowances=self._allowances)
        pool = Pool(policy, virtual_now_us, weight_percent=300, allowances=self._allowances)
        pool.set_engines(
            [
                EngineOffer(f"{one.name}#1", offered(tokens), offered(requests), one.prefill)
                for one in policy.engines.static
                for tokens, requests in [one.capacity.size(None, None)]
            ]
        )
        return pool

    async def ask(self, sent: Sent) -> Caller:
        """Sends a request."""
        client = None if sent.client is None else (sent.client, 1)
        scope = {"query_string": sent.query, "headers": sent.pairs, "client": client}
        caller = Caller(self.serve, sent.body, path=sent.path, **scope)
        await caller.run()
        return caller

    @property
    def served(self) -> Sequence[str]:
        """The models whose engines got the request; a model of no name where there is one pool."""
        one = self.controller
        found = {"": one, **one.controllers} if isinstance(one, ModelsController) else {"": one}
        return [name for name, controller in found.items() if isinstance(controller.app, App) and controller.app.seen]

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Is the ASGI app."""
        if isinstance(self.controller, ModelsController):
            await serve_models(self.controller, self.controller.app, scope, receive, send)
        else:
            await self.controller(scope, receive, send)


async def enforced(policy: Policy, sent: Sent) -> Said:
    sidecar = Sidecar(policy)
    caller = await sidecar.ask(sent)
    (story,) = sidecar.recorder.stories
    said: Said = {"code": None, "message": None}
    if isinstance(story.end, Refused):
        error = caller.json["error"]
        said = {"code": story.end.code, "message": error["message"], "status": caller.status}
        assert (error.get("code") or story.end.code, error["message"]) == (story.end.code, story.end.message)
        said |= {"refused in": story.end.tier, "tenant": story.end.tenant}
    else:
        said |= {"ignored": _ignored(caller), "served": sidecar.served}
    return {**said, **_sized(sidecar.recorder)}


async def observed(policy: Policy, sent: Sent) -> Said:
    sidecar = Sidecar(replace(policy, mode=Mode.OBSERVE))
    caller = await sidecar.ask(sent)
    assert caller.status == 200
    while not sidecar.observed:  # noqa: ASYNC110  # virtual time: a shadow may wait for an hour
        await asyncio.sleep(1)
    (found,) = sidecar.observed
    assert (found.verdict is Verdict.ADMITTED) == (found.code is None)
    said = {"code": found.code, "tenant": found.tenant, **_sized(sidecar.recorder)}
    said["clamped_from"] = found.clamped_from
    said.pop("downgraded_from", None)  # it is reported before the pool has looked at the request; the tier is not
    if found.code is None:
        return {**said, "tier": found.tier, "ignored": _ignored(caller), "served": sidecar.served}
    return {**said, "refused in": found.tier}


def _ignored(caller: Caller) -> Sequence[str]:
    ignored = dict(caller.sent[0]["headers"]).get(b"x-admission-ignored", b"").decode()
    return ignored.split(", ") if ignored else []


def _sized(recorder: Recorder) -> Said:
    """What is reported of a request that was read, and what its answer cost."""
    said: Said = {}
    for made in (event for story in recorder.stories for event in story.events if isinstance(event, Classified)):
        said = {name: getattr(made, name) for name in ("tier", "tenant", "source", "clamped_from", "downgraded_from")}
        said |= {"tokens": made.tokens, "requests": made.requests}
    for ended in (event for story in recorder.stories for event in story.events if isinstance(event, Settled)):
        said["used"] = (ended.outcome, ended.status, ended.tokens_used, ended.input_tokens, ended.output_tokens)
    return said


def explained(loaded: Loaded, sent: Sent) -> Said:
    query = sent.query.decode("utf-8", "surrogateescape")
    target = f"{sent.path}?{query}" if query else sent.path
    found = asyncio.run(RequestExplanation(loaded, Estimator(), sent.client).of(target, sent.pairs, sent.body))
    error = found.get("error") or {"code": None, "message": None}
    said = {
        **error,
        **{name: found[name] for name in ("tier", "clamped_from", "downgraded_from", "source") if name in found},
    }
    if "tenant" in found:
        said["tenant"] = found["tenant"]["name"]
    if "holds" in found:
        said |= found["holds"]
        said["longest_wait_s"] = found.get("longest_wait_s")
        said["pool"] = None if found["placement"] is None else found["placement"]["model"]
    return said if error["code"] else {**said, "ignored": found["ignored"]}


async def leased(policy: Policy, found: Said) -> Said:
    """A lease of the size that was found, for the same tenant."""
    admission = Admission(Sidecar(policy).controller)
    block = admission.lease(
        tokens=found["tokens"],
        tier=found["downgraded_from"] or found["tier"],
        tenant=found["tenant"],
        requests=found["requests"],
        prompt_tokens=found["prompt_tokens"],
        max_wait_s=found["longest_wait_s"],
        model=found["pool"],
    )
    try:
        async with block as lease:
            return {"code": None, "message": None, "tokens": lease.tokens, "tier": lease.tier, "tenant": lease.tenant}
    except AdmissionError as refusal:
        return {"code": refusal.code, "message": refusal.message, "status": refusal.status}


def simulated(policy: Policy, found: Said) -> Said:
    """A request of a trace with a prompt of the size that was found, which says no maximum of its output."""
    stage = SimulatedEngines(
        EngineModel(name="e", step_us=1, kv_tokens=policy.rules.tokens, max_sequences=policy.rules.requests),
        1,
        VirtualLoop(),
    )
    level = next(tier.level for tier in policy.tiers if tier.name == found["tier"])
    request = Request(TraceRow(1, input_tokens=found["prompt_tokens"], output_tokens=1), level, found["tenant"], ())
    with stage.loop.running():
        admission = ProductAdmission(policy, stage)
        admission.arrives(request)
        stage.loop.run_ready()
        if request.refusal is not None:
            return {"code": request.refusal}
        ask = admission._held[request].turn.lease.ask
        return {"code": None, "tokens": ask.tokens, "requests": ask.requests}


def is_simulated(found: Said) -> bool:
    """Whether a trace can have such a request: of one sequence, with no maximum, in one engine."""
    is_plain = (found["prompts"], found["choices"], found["unsized"], found["output_cap"]) == (1, 1, None, None)
    return is_plain and found["prompt_tokens"] > 0 < found["output_tokens"] and found["output_by"] != "the request"


# -- what they are asked

MESSAGES = [{"role": "user", "content": "hi"}]
RIGHT: dict[str, Said] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
    "/v1/embeddings": {"input": "hi"},
    "/paint": {},
    "/v1/batch/completions": {"prompt": "hi"},
    "/v1//completions/": {"prompt": "hi"},
}
VALUES: Said = {
    "model": ["m", "q", "lora"],
    "messages": [[1], [{"role": "user", "content": "a" * 3000}]],
    "prompt": [["a", "b"], [1, 2, 3], [[1], [2, 3]], ["a"] * 9],
    "input": [["a"] * 9, [1] * 400, MESSAGES],
    "max_tokens": [0, 1, 60, 100, 101, 300, 600, 1150, 5000],
    "max_completion_tokens": [0, 70, 101],
    "max_output_tokens": [0, 70, 101, 1150],
    "n": [1, 3, 9],
    "best_of": [2, 9],
    "priority": ["high", "batch", 0, 0.7, 5],
    "stream": [True],
}
MISTAKES: Said = {
    "model": ["none", None],
    "messages": [[], "hi"],
    "prompt": ["", 5],
    "max_tokens": [-1, 1.5, "9"],
    "n": [0, 21],
    "priority": ["urgent", 10, -3, True],
    "background": [True],
    "session_params": [{"id": "s"}],
    "input_ids": [list(range(300))],
}
PROMPTS = ("messages", "prompt", "input")


@st.composite
def right_bodies(draw: st.DrawFn, path: str) -> bytes:
    """A body that the path takes: of any size, with one mistake at most."""
    right = RIGHT[path]
    members = {"model": "m", **right}
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3)):
        if name in right or name not in PROMPTS:
            members[name] = draw(st.sampled_from(VALUES[name]))
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(sorted(MISTAKES)))
        members[name] = draw(st.sampled_from(MISTAKES[name]))
    return json.dumps(members).encode()


ODD_BODIES = st.one_of(
    st.sampled_from([b"", b"{", b"[]", b'{"model": "\xff"}', b'{"messages": [1], "max_tokens": 1, "max_tokens": 999}']),
    FUZZED_BODIES,
    mutated(FUZZED_BODIES),
)


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """A request that is right, or wrong in one thing or in many."""
    path = draw(st.sampled_from(sorted(RIGHT)))
    pairs = [*draw(KEYS), *(draw(HEADERS) if draw(st.booleans()) else [])]
    body = draw(right_bodies(path) if draw(st.integers(0, 4)) else ODD_BODIES)
    if (b"content-encoding", b"gzip") in pairs and draw(st.booleans()):
        body = gzip.compress(body, mtime=0)
    return Sent(path, pairs, body, draw(QUERIES), draw(CLIENTS))


HEADERS = st.lists(
    st.sampled_from(
        [
            (b"x-priority", b"high"), (b"x-priority", b"batch"), (b"x-priority", b"urgent"), (b"x-priority", b"0.9"),
            (b"x-admission-max-wait", b"3s"), (b"x-admission-max-wait", b"0s"), (b"x-admission-max-wait", b"soon"),
            (b"x-slo-ttft-ms", b"2500"), (b"x-slo-tpot-ms", b"1"), (b"x-vllm-priority", b"-5"), (b"via", b"1.1 proxy"),
            (b"content-encoding", b"gzip"), (b"content-length", b"7000000000"), (b"content-length", b"many"),
            (b"transfer-encoding", b"chunked"), (b"content-type", b"multipart/form-data; boundary=x"),
            (b"x-stainless-retry-count", b"1"), (b"authorization", b"Basic YTpi"), (b"x-api-key", KEY.encode()),
            (b"x-api-key", b"sk-no-one"), (b"x-goog-api-key", KEY.encode()),
            (b"x-tenant", b"acme"), (b"x-tenant", b"acme"), (b"x-tenant", b"no-one"), (b"x-asks", b"batch"),
        ]
    ),
    max_size=3,
) | scopes().map(lambda scope: scope["headers"])  # fmt: skip
CLIENTS = st.sampled_from([None, "10.0.0.7", "192.0.2.1"])
KEYS = st.sampled_from([[], ACME, ACME, ACME, [(b"authorization", b"Bearer EMPTY")]])
QUERIES = st.sampled_from(
    [b"", b"", b"", b"beta=true", b"key=" + KEY.encode(), b"key=1&key=" + KEY.encode()]
) | st.binary(max_size=6)


def compare(loaded: Loaded, sent: Sent) -> Said:
    """Sends a request every way, and returns what the middleware says."""
    if not {b"content-length", b"transfer-encoding"} & {name for name, _ in sent.pairs}:
        sent = sent._replace(pairs=[*sent.pairs, (b"content-length", b"%d" % len(sent.body))])
    policy = loaded.policy
    said, found = run_virtually(enforced(policy, sent)), explained(loaded, sent)
    agree(said, found, "explain")
    agree(said, run_virtually(observed(policy, sent)), "observe")
    if "tokens" in found:
        agree(said, run_virtually(leased(policy, found)), "lease")
        if policy.engines is None and found["tenant"] != "acme" and is_simulated(found):
            agree(said, simulated(policy, found), "simulate")
    return said


def agree(said: Said, other: Said, way: str) -> None:
    """Fails unless the other way says the same as the middleware, as far as both say it."""
    both = said.keys() & other.keys()
    assert {name: other[name] for name in both} == {name: said[name] for name in both}, way


@given(place=PLACES, request=requests())
def test_whatever_is_sent_every_way_decides_the_same(policies: list[Loaded], place: int, request: Sent) -> None:
    compare(policies[place], request)


@each("file", HTTP, ids=names(HTTP))
def test_so_it_is_for_what_was_found_once(policies: list[Loaded], file: Path) -> None:
    head, _, body = file.read_bytes().partition(b"\r\n\r\n")
    line, *lines = head.split(b"\r\n")
    pairs = [(name.lower(), value.strip()) for name, _, value in (one.partition(b":") for one in lines)]
    path, _, query = line.split(b" ")[1].partition(b"?")
    if find_endpoint(by_path(policies[0].policy.endpoints), {"path": path.decode()}) is not None:
        for loaded in policies:
            compare(loaded, Sent(path.decode(), pairs, body, query))


@each(
    ("place", "pairs", "members", "code"),
    [
        (0, ACME, {"max_tokens": 101}, "output_too_long"),
        (0, ACME, {"max_tokens": 100, "n": 6}, "tenant_limit"),
        (0, ACME, {"session_params": {"id": "s"}}, "unsized_prompt"),
        (0, [*ACME, *ACME], {}, "invalid_header"),
        (0, [*ACME, (b"content-encoding", b"br")], {}, "unsupported_encoding"),
        (0, [*ACME, (b"content-length", b"7000000000")], {}, "body_too_large"),
        (0, [], {"max_tokens": 5000, "n": 21, "session_params": {}}, "too_many_choices"),
        (0, ACME, {}, None),
        (1, [], {}, "invalid_api_key"),
        # Each engine is large enough in one dimension, and none in both.
        (3, ACME, {"max_tokens": 150, "n": 4}, "queue_timeout"),
        (3, [], {"max_tokens": 150, "n": 4, "priority": "batch"}, "queue_full"),
        (4, ACME, {"model": "none"}, "model_not_found"),
        (4, ACME, {"model": None}, "invalid_body"),
        (4, ACME, {"model": "q", "max_tokens": 100, "n": 8}, "request_too_large"),
    ],
)
def test_what_is_refused(policies: list[Loaded], place: int, pairs: Pairs, members: Said, code: str | None) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, **members}).encode()
    assert compare(policies[place], Sent("/v1/chat/completions", pairs, body))["code"] == code


def test_a_body_that_comes_slowly_is_observed_at_an_engine_of_its_model(policies: list[Loaded]) -> None:
    policy = policies[4].policy
    body = json.dumps({"model": "q", "messages": MESSAGES}).encode()

    async def sends() -> Sidecar:
        sidecar = Sidecar(replace(policy, mode=Mode.OBSERVE))
        caller = Caller(sidecar.serve)
        asking = caller.begin()
        caller.incoming.put_nowait({"type": "http.request", "body": body[:20], "more_body": True})
        await asyncio.sleep(10 * policy.body_timeout_s)
        caller.incoming.put_nowait({"type": "http.request", "body": body[20:], "more_body": False})
        await asking
        assert caller.status == 200
        return sidecar

    sidecar = run_virtually(sends())
    assert sidecar.served == ["q"]
    assert [one.code for one in sidecar.observed] == ["body_timeout"]
