"""Admission by the product: a policy's own pool, scheduler, placement and learned lengths, in virtual time.

Each request is sized and takes its turn as one of HTTP does, is sent to the engine of its grant, is looked at while it
streams, and is learned from at its end. The engine serves the level of the grant first, as vLLM's priority scheduling
does. Left out: the proxy's own time, and limits of tenants. What an engine has of a prompt is what its cache has when
the request comes, instead of the table in which the product keeps what it believes of that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from sidecar.admission.deadline import latest_deadline_us
from sidecar.admission.intake import SizedRequest, sized_for
from sidecar.admission.model_names import ModelNames
from sidecar.admission.policy_snapshot import objective_for
from sidecar.admission.request_gain import GainMeter
from sidecar.admission.slo import SloFollower
from sidecar.admission.turn import EndCause, Turn, TurnEnded, TurnUser
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.engines.speed import Coefficients, EngineSpeeds
from sidecar.errors import AdmissionError
from sidecar.identity.classify import Classification, Fallback
from sidecar.lengths.estimator import LengthEstimator
from sidecar.lengths.lease_size import LeaseSize, LeaseSizes
from sidecar.lengths.token_estimates import tokens_to_hold
from sidecar.payload.decode import decode
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Tenant
from sidecar.pools import Lease, Pool
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.tools.simulate.guarded import GuardResult, SimulatedGuards
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import ABANDONED, SimulatedEngines

CHAT = "/v1/chat/completions"
_MOST_HITS = 8
_PAYLOAD = decode(Api.CHAT, json.dumps({"model": "m", "messages": [{"role": "user"}], "stream": True}).encode())


class _Held(TurnUser):
    """One request in the pool, at its place there.

    `removed` is done when an engine no longer runs it: whether it waits again. One that `is_preempted` before it
    `is_sent` waits again without it. `left` is done when its client leaves
    while it waits. `followed` is there for a guarded tier.
    """

    __slots__ = (
        "_stage", "answer", "followed", "is_preempted", "is_sent", "left", "place", "removed", "request", "size",
        "turn",
    )  # fmt: skip

    def __init__(self, request: Request, place: int, stage: SimulatedEngines, followed: SloFollower | None) -> None:
        self.request = request
        self.followed = followed
        self.place = place
        self.left: asyncio.Future[None] = stage.loop.create_future()
        self._stage = stage
        self.turn: Turn
        self.removed: asyncio.Future[bool]
        self.answer = UsageReader()
        self.size: LeaseSize | None = None
        self.is_sent = self.is_preempted = False

    def disconnect(self) -> asyncio.Future[None]:
        """See `TurnUser`."""
        return self.left

    def entered(self, lease: Lease | None) -> None:
        """See `TurnUser`."""
        if lease is not None:
            lease.on_preempt = self._preempt
        if self.followed is not None:
            self.followed.entered(lease)

    def _preempt(self) -> None:
        if self.followed is not None:
            self.followed.preempted()
        if self.is_sent:
            self._stage.abort(self.request)
        else:
            self.is_preempted = True


class _TrueSpeeds(EngineSpeeds):
    """The speed of a run's engines as it is, in place of what is learned of them."""

    def __init__(self, stage: SimulatedEngines) -> None:
        super().__init__()
        self._stage = stage

    def typical(self) -> Coefficients:
        model, engines = self._stage.model, self._stage.engines
        step_us = model.duration_us(sum(engine.running for engine in engines) // len(engines), 0)
        return Coefficients(
            round(model.step_us_per_prefill_token * 1000),
            round(model.cost_us_per_output_token * 1000),
            step_us,
            step_us,
        )


class ProductAdmission:
    """See `play.SimulatedAdmission`. The pool is as large as the engines are."""

    def __init__(self, policy: Policy, stage: SimulatedEngines) -> None:
        self._policy, self._stage = policy, stage
        self._objectives = [objective_for(tier) if policy.rules.is_by_gain else None for tier in policy.tiers]
        self._pool = _pool(policy, stage, lambda: stage.loop.now_us)
        self._sizes = LeaseSizes(policy.learn, self._pool.now_us, LengthEstimator())
        self._gain = GainMeter(self._pool.now_us, self._sizes)
        self._gain.speeds = _TrueSpeeds(stage)
        self._names = [tier.name.encode() for tier in policy.tiers]
        self._token_cost = ModelNames(policy).cost(None)
        self._held: dict[Request, _Held] = {}
        self._guards = SimulatedGuards(policy, self._pool, stage)
        self._came = 0

    def guarded(self) -> Mapping[str, GuardResult]:
        """The tiers whose SLO is held, by name, at the end of the run."""
        return self._guards.results()

    def arrives(self, request: Request) -> None:
        """See `Admission`."""
        self._came += 1
        held = self._held[request] = _Held(request, self._came, self._stage, self._guards.follow(request))
        self._stage.loop.create_task(self._serve(held, self._size(request))).add_done_callback(_raise_defect)

    def leaves(self, request: Request) -> None:
        """See `Admission`. In an engine it is ended first."""
        held = self._held[request]
        if held.turn.lease.grant is None:
            held.left.set_result(None)
        else:
            request.has_left = True
            self._stage.abort(request)

    def first_token(self, request: Request) -> None:
        """See `Admission`."""
        held = self._held[request]
        held.turn.lease.keep()
        held.turn.lease.prefilled()
        if held.followed is not None:
            held.followed.first_token()
        self._look(held)

    def reached(self, request: Request) -> None:
        """See `Admission`."""
        self._look(self._held[request])

    def finished(self, request: Request) -> None:
        """See `Admission`."""
        held = self._held.pop(request)
        held.answer.chunks = request.output
        held.answer.counted(None, request.output)
        if held.size is not None:
            held.size.ended()
        if (expected := held.turn.request.expected) is not None:
            self._sizes.learn(expected, held.answer, is_complete=True)
        used, cost = request.prompt + request.output, held.turn.request.token_cost
        held.turn.lease.settle(used if cost is None else cost.of(request.prompt, request.cached_tokens, request.output))
        if held.followed is not None:
            assert request.first_us is not None
            held.followed.finished(self._stage.loop.now_us - request.first_us, request.output)
        self._guards.finished(request)
        held.removed.set_result(False)

    def removed(self, request: Request) -> None:
        """See `Admission`: it was preempted, and waits again, or its client has left."""
        held = self._held[request]
        if held.size is not None:
            held.size.ended()
            held.size = None
        if request.has_left:
            held.turn.lease.settle()
            self._end(request, ABANDONED)
        held.removed.set_result(not request.has_left)

    async def _serve(self, held: _Held, sized: SizedRequest) -> None:
        """Takes the request's turn in the pool, as often as it is preempted."""
        request = held.request
        try:
            if request.deadline_s is not None:
                now_us = self._pool.now_us()
                asked_us = now_us + round(request.deadline_s * 1e6)
                latest_us = latest_deadline_us(self._policy, request.tier, asked_us, now_us)
                sized = msgspec.structs.replace(sized, deadline_us=latest_us, objective=None)
            sized = sized_for(self._pool, sized, self._sizes, self._gain, self._names)
            turn = held.turn = Turn(self._pool, self._policy, sized, sized.ask(), held, sizes=self._sizes)
            async with turn as first:
                grant = first
                while True:
                    if held.is_preempted:  # in the moment of its grant
                        held.is_preempted = False
                        grant = await turn.requeue()
                        continue
                    held.is_sent = True
                    if held.followed is not None:
                        held.followed.granted()
                    held.removed = self._stage.loop.create_future()
                    if (expected := turn.request.expected) is not None:
                        held.size = self._sizes.begin(expected, turn.lease, held.answer, streams=True)
                    request.place = (float(grant.level),), request.place[1] or held.place
                    self._stage.send(request, 0 if grant.engine is None else int(grant.engine.partition("#")[0][1:]))
                    waits_again = await held.removed
                    held.is_sent = False
                    if not waits_again:
                        break
                    grant = await turn.requeue()
        except TurnEnded as end:
            self._end(request, ABANDONED if end.cause is EndCause.DISCONNECTED else end.code)
        except AdmissionError as error:
            self._end(request, error.code)

    def _size(self, request: Request) -> SizedRequest:
        """The request, as the intake would have read it from a body that says no maximum of its output."""
        tenant = Tenant(name=request.tenant, level=request.tier, max_level=0)
        output = self._policy.tiers[request.tier].default_output_tokens
        return SizedRequest(
            headers={},
            payload=_PAYLOAD,
            classification=Classification(tenant, request.tier, Fallback.DEFAULT, None, ()),
            api=Api.CHAT,
            path=CHAT,
            prompt_tokens=request.prompt,
            tokens=tokens_to_hold(_PAYLOAD, request.prompt, output),
            assumed_output=output,
            hits=self._hits(request),
            objective=self._objectives[request.tier],
            token_cost=self._token_cost,
        )

    def _hits(self, request: Request) -> tuple[tuple[str, int], ...]:
        if not request.blocks or len(self._stage.engines) == 1:
            return ()
        found = [
            (_id(number), engine.cache.hit_length(request.blocks, request.prompt))
            for number, engine in enumerate(self._stage.engines)
        ]
        return tuple(sorted((one for one in found if one[1]), key=lambda one: -one[1])[:_MOST_HITS])

    def _look(self, held: _Held) -> None:
        request = held.request
        if held.size is None or request.engine is None:
            return
        engine = self._stage.engines[request.engine]
        held.answer.chunks = engine.length(request)
        if held.answer.chunks >= held.size.next_look:
            held.size.look()
        engine.report_at(request, held.size.next_look)

    def _end(self, request: Request, why: str) -> None:
        held = self._held.pop(request)
        if held.followed is not None:
            if why != ABANDONED:
                held.followed.refused()
            held.followed.close()
        self._stage.refuse(request, why)


def _raise_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()


def _id(number: int) -> str:
    return f"e{number}#1"


def _pool(policy: Policy, stage: SimulatedEngines, now_us: Callable[[], int]) -> Pool:
    """A pool as large as the engines: the policy's own figures are those of other engines."""
    model, count = stage.model, len(stage.engines)
    if count == 1 and policy.engines is None:
        sized = replace(policy, rules=policy.rules_for(model.kv_tokens, model.max_sequences))
        return Pool(sized, now_us)
    prefill = model.chunk_tokens if policy.engines is None else policy.engines.prefill
    pool = Pool(policy, now_us, weight_percent=WEIGHT_PERCENT)
    offers = [EngineOffer(_id(number), model.kv_tokens, model.max_sequences, prefill) for number in range(count)]
    pool.set_engines(offers)
    return pool
