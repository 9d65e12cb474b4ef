"""Admission by the product: a policy's own pool, scheduler, placement and learned lengths, in virtual time.

Each request takes the steps of `admission.turn` and `middleware.request` in their order: it is sized, enters the pool,
is sent to the engine of its grant, is looked at while it streams, and is learned from at its end. The engine serves the
level of the grant first, as vLLM's priority scheduling does. Left out: the proxy's own time, and limits of tenants.
What an engine has of a prompt is what its cache has when the request comes, instead of the table in which the product
keeps what it believes of that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sidecar.apis import Api
from sidecar.errors import AdmissionError
from sidecar.lengths.estimator import LengthEstimator
from sidecar.middleware.lease_size import Expected, LeaseSize, LeaseSizes
from sidecar.middleware.policy_snapshot import objective_of
from sidecar.middleware.request_gain import LEAST_SLACK_US
from sidecar.payload.decode import decode
from sidecar.policy.model import Policy
from sidecar.pools.base import Ask, Lease
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.pools.ledger_pool import LedgerPool
from sidecar.scheduling.tickets import Gain
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import ABANDONED, Stage
from sidecar.tools.simulate.virtual_loop import at_once

CHAT = "/v1/chat/completions"
_MOST_HITS = 8
_PAYLOAD = decode(Api.CHAT, json.dumps({"model": "m", "messages": [{"role": "user"}], "stream": True}).encode())


class _Answer:
    """What `LeaseSizes` reads of a request's answer: one token an event."""

    __slots__ = ("chunks", "large_tokens", "later_chunks", "later_tokens", "output_tokens")

    def __init__(self) -> None:
        self.chunks = self.large_tokens = self.later_chunks = 0
        self.output_tokens: int | None = None
        self.later_tokens: int | None = None


class _Held:
    """One request in the pool."""

    __slots__ = ("answer", "expected", "lease", "size")

    def __init__(self, lease: Lease, expected: Expected | None) -> None:
        self.lease = lease
        self.expected = expected
        self.answer = _Answer()
        self.size: LeaseSize | None = None


class ProductAdmission:
    """See `play.Admission`. The pool is as large as the engines are."""

    def __init__(self, policy: Policy, stage: Stage) -> None:
        self._policy, self._stage = policy, stage
        self._objectives = [objective_of(tier) if policy.rules.is_by_gain else None for tier in policy.tiers]
        self._pool = _pool(policy, stage, lambda: stage.loop.now_us)
        self._sizes = LeaseSizes(policy.learn, self._pool.now_us, LengthEstimator())
        self._held: dict[Request, _Held] = {}

    def arrives(self, request: Request) -> None:
        """See `Admission`."""
        tier = self._policy.tiers[request.tier]
        limit = self._pool.most_tokens(request.tier)
        assumed = min(tier.default_output_tokens, max(0, limit - request.prompt))
        tokens = most = request.prompt + assumed
        expected = None
        if self._sizes.learns:
            expected = self._sizes.expect(request.tenant, CHAT, _PAYLOAD, request.prompt, most, assumed, None, limit)
            tokens = tokens if expected is None else expected.tokens
        hits = self._hits(request)
        gain = self._gain(request, expected, assumed, max((hit for _, hit in hits), default=0))
        ask = Ask(request.tier, request.tenant, 1, tokens, 1, prompt=request.prompt, hits=hits, most=most, gain=gain)
        try:
            lease = at_once(self._pool.enter(ask))
        except AdmissionError as error:
            self._stage.refuse(request, error.code)
            return
        self._held[request] = _Held(lease, expected)
        lease.on_preempt = partial(self._stage.abort, request)
        if tier.max_wait_s is not None:
            self._stage.loop.call_later(tier.max_wait_s, self._too_long, request)
        self._wait(request)

    def leaves(self, request: Request) -> None:
        """See `Admission`. In an engine it is ended first."""
        lease = self._held[request].lease
        if lease.grant is None:
            lease.leave()
            self._end(request, ABANDONED)
        else:
            request.has_left = True
            self._stage.abort(request)

    def first_token(self, request: Request) -> None:
        """See `Admission`."""
        held = self._held[request]
        held.lease.keep()
        held.lease.prefilled()
        self._look(request, held)

    def reached(self, request: Request) -> None:
        """See `Admission`."""
        self._look(request, self._held[request])

    def finished(self, request: Request) -> None:
        """See `Admission`."""
        held = self._held.pop(request)
        held.answer.chunks = held.answer.output_tokens = request.output
        if held.size is not None:
            held.size.ended()
        if held.expected is not None:
            self._sizes.learn(held.expected, held.answer, is_complete=True)
        held.lease.settle(request.prompt + request.output)

    def removed(self, request: Request) -> None:
        """See `Admission`: it was preempted, and waits again, or its client has left."""
        held = self._held[request]
        if held.size is not None:
            held.size.ended()
            held.size = None
        if request.has_left:
            held.lease.settle()
            self._end(request, ABANDONED)
            return
        held.lease.requeue()
        self._wait(request)

    def _hits(self, request: Request) -> tuple[tuple[str, int], ...]:
        if not request.blocks or len(self._stage.engines) == 1:
            return ()
        found = [
            (_id(number), engine.cache.hit_length(request.blocks, request.prompt))
            for number, engine in enumerate(self._stage.engines)
        ]
        return tuple(sorted((one for one in found if one[1]), key=lambda one: -one[1])[:_MOST_HITS])

    def _gain(self, request: Request, expected: Expected | None, assumed: int, hit: int) -> Gain | None:
        """What the product estimates, with the engine's true coefficients in place of learned ones."""
        objective = self._objectives[request.tier]
        if objective is None:
            return None
        tokens, model = assumed, self._stage.model
        if expected is not None:
            found = self._sizes.estimate(expected.place, 0.5)
            tokens = assumed if found is None else min(found.tokens, expected.longest)
        prompt_us = model.step_us_per_prefill_token * (request.prompt - hit)
        engines = self._stage.engines
        step_us = model.duration_us(sum(len(engine.running()) for engine in engines) // len(engines), 0)
        return Gain(
            objective.weight,
            tokens,
            round(prompt_us + tokens * model.cost_us_per_output_token),
            round(objective.ttft_us - step_us - prompt_us),
            max(LEAST_SLACK_US, objective.tpot_us - step_us),
        ).bounded()

    def _wait(self, request: Request) -> None:
        lease = self._held[request].lease
        if lease.grant is not None:
            self._granted(request)
        else:
            lease.wait().add_done_callback(lambda _: self._granted(request))

    def _granted(self, request: Request) -> None:
        held = self._held.get(request)
        if held is None:
            return
        if held.lease.grant is None:  # the pool cannot hold it any more
            self._end(request, "request_too_large")
            return
        if held.expected is not None:
            held.size = self._sizes.begin(held.expected, held.lease, held.answer, streams=True)
        grant = held.lease.grant
        request.place = (float(grant.level),), request.place[1] or held.lease.id
        self._stage.send(request, 0 if grant.engine is None else int(grant.engine.partition("#")[0][1:]))

    def _look(self, request: Request, held: _Held) -> None:
        if held.size is None or request.engine is None:
            return
        engine = self._stage.engines[request.engine]
        held.answer.chunks = engine.length(request)
        if held.answer.chunks >= held.size.next_look:
            held.size.look()
        engine.report_at(request, held.size.next_look)

    def _too_long(self, request: Request) -> None:
        held = self._held.get(request)
        if held is not None and held.lease.grant is None:
            held.lease.leave()
            self._end(request, "queue_timeout")

    def _end(self, request: Request, why: str) -> None:
        del self._held[request]
        self._stage.refuse(request, why)


def _id(number: int) -> str:
    return f"e{number}#1"


def _pool(policy: Policy, stage: Stage, now_us: Callable[[], int]) -> LedgerPool:
    """A pool as large as the engines: the policy's own figures are those of other engines."""
    model, count = stage.model, len(stage.engines)
    if count == 1 and policy.engines is None:
        sized = replace(policy, rules=policy.rules_of(model.kv_tokens, model.max_sequences))
        return LedgerPool(sized, now_us)
    prefill = model.chunk_tokens if policy.engines is None else policy.engines.prefill
    pool = LedgerPool(policy, now_us, weight_percent=WEIGHT_PERCENT)
    offers = [EngineOffer(_id(number), model.kv_tokens, model.max_sequences, prefill) for number in range(count)]
    pool.set_engines(offers)
    return pool
