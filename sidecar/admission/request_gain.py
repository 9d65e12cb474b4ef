"""Service gain of requests as they pass: each token against its deadline, and the engines' speed.

A `RequestGain` follows one request of a policy in which a tier has `slo: {ttft, tpot}`; other policies have none. Its
`feed` takes the place of the usage reader's where the request's own tier has such an objective: only there a clock is
read for each chunk. Every request tells the speed of its engine when it was sent, when its first byte came and when it
ended, because the others wait for it.

What could be earned by a request that was refused, or whose client left, is counted by the length expected of it: the
median that was learned, or else the mean of its tier's answers, or else what the policy assumes. Mistakes of a client
(a request that the engine or the middleware answers with 400 to 428) are no offered load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from sidecar.admission.intake import SizedRequest
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.slo import SloReport
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.engines.speed import (
    LOOK_AFTER,
    MOST_TOKENS_PER_EVENT,
    Coefficients,
    EngineSpeed,
    EngineSpeedDocument,
    EngineSpeeds,
    GenerationLoad,
    TimedCall,
)
from sidecar.events import Outcome, ServiceGain
from sidecar.gain.token_deadlines import Earned, GainLedger, Objective, TierGain, TierGainDocument, TokenDeadlines
from sidecar.lengths.lease_size import LeaseSizes
from sidecar.scheduling.tickets import TicketGain

FIRST_LATER_STATUS = 429
"""The lowest status that may say that there was no room: those below are mistakes of the client."""
_TOKENS_LATER = frozenset((Api.RESPONSES, Api.MESSAGES))
"""APIs whose streams begin with events that have no token."""
_DELTA = b"delta"
_EMPTY = re.compile(rb'"content": ?""')
"""In the first event of a chat, which only says whose turn it is."""
_WITHOUT_TOKEN = re.compile(
    rb'"choices": ?\[\]|data: ?\[DONE\]'
    rb'|data: ?\{"type": ?"(?:message_delta|message_stop|content_block_stop'
    rb'|response\.[a-z_.]*(?:done|completed|incomplete|failed))"'
)
"""In an event after the last token: the engine's count, or the end of the message."""
_NEVER = 2**62
LEAST_SLACK_US = 1_000
"""Of one token, where an engine is as slow as the objective, or slower."""
UNBLOCKED_BYTES = 32 * 1024
"""Bytes of a stream that servers and sockets take before they wait for a client that does not read: uvicorn 64 KiB,
hypercorn 32 KiB, and as much again in the system's buffers."""
MOST_SHOWN = 64
"""Engines in a document, as in metrics."""


def gain_for(objective: Objective, speed: Coefficients, uncached: int, tokens: int) -> TicketGain:
    """The figures of a request by an engine's speed, with so many tokens of its prompt to compute, and of output."""
    return TicketGain(
        objective.weight,
        tokens,
        speed.cost_us(uncached, tokens),
        objective.ttft_us - speed.prefill_us(uncached),
        max(LEAST_SLACK_US, objective.tpot_us - speed.token_us),
    ).bounded()


class GainDocument(msgspec.Struct, frozen=True):
    """The service gain of one process in one pool: the admin port's `/state` has it."""

    tiers: list[TierGainDocument] = []
    engines: list[EngineSpeedDocument] = []


class GainMeter:
    """The gain of one pool's requests in one process, and the speed of its engines.

    `replicas` is how many processes share the pool. `note_slo` is the pool's.
    """

    def __init__(
        self,
        now_us: Callable[[], int],
        sizes: LeaseSizes,
        replicas: Callable[[], int] = lambda: 1,
        note_slo: Callable[[int, str, bool], None] = lambda *_: None,
    ) -> None:
        self.now_us = now_us
        self._note_slo = note_slo
        self.away_until_us = -1
        self._replicas = replicas
        self.speeds = EngineSpeeds()
        self.ledger = GainLedger()
        self._sizes = sizes

    def engine_changed(self, *, is_usable: bool) -> None:
        """Requests can be sent to the engine, or cannot, from now on. It was `away_until_us`, -1 for never."""
        if not is_usable:
            self.away_until_us = _NEVER
        elif self.away_until_us == _NEVER:
            self.away_until_us = self.now_us()

    def follow(self, request: SizedRequest, snapshot: PolicySnapshot, arrived_us: int) -> RequestGain | None:
        """Follows a request that was classified. None where it generates nothing, or where no one waits for it.

        One that its tenant's limits moved to a lower tier has that tier's objective.
        """
        if request.assumed_output < 1 or request.payload.background:
            return None
        classification = request.classification
        level, objective = classification.level, request.objective
        is_downgraded = classification.downgraded_from is not None
        if is_downgraded and request.deadline_us is None:
            objective = snapshot.objectives[level]
        tier = None if objective is None else self.ledger.tier(snapshot.tier_names[level].decode())
        report = None
        if snapshot.are_guarded[level] and not is_downgraded and objective is not None:
            note = partial(self._note_slo, level, classification.tenant.name)
            report = SloReport(note, arrived_us + objective.ttft_us)
        return RequestGain(self, request, objective, tier, arrived_us, report=report)

    def appraise(self, request: SizedRequest, tier_names: Sequence[bytes]) -> TicketGain | None:
        """The figures of a request for the order by gain: none where its tier has no objective."""
        objective = request.objective
        if objective is None or request.assumed_output < 1 or request.payload.background:
            return None
        tier = self.ledger.tier(tier_names[request.classification.level].decode())
        speed = self.speeds.typical()
        tokens = self.expected_tokens(request, tier)
        return gain_for(objective, speed, _least_uncached(request), tokens)

    def document(self) -> GainDocument:
        """The gain by tier and the speed by engine, in bounded size. Also notes how many replicas there are now."""
        self.speeds.share(self._replicas())
        engines = self.speeds.engines
        shown = sorted(engines, key=lambda name: -engines[name].running)[:MOST_SHOWN]
        return GainDocument(
            self.ledger.documents(),
            [engines[name].document(name) for name in sorted(shown, key=lambda name: name or "")],
        )

    def expected_tokens(self, request: SizedRequest, tier: TierGain) -> int:
        """The length that is expected of all sequences of a request's answer."""
        expected = request.expected
        most = request.assumed_output * request.payload.shown_sequences
        if expected is not None:
            found = self._sizes.estimate(expected.place, 0.5)
            if found is not None:
                return min(found.tokens, expected.longest) * expected.shown
        return most if tier.mean_tokens is None else min(most, max(1, round(tier.mean_tokens)))


def _least_uncached(request: SizedRequest) -> int:
    """The tokens of its prompt that the engine with the best hit has to compute."""
    return max(0, request.prompt_tokens - max((hit for _, hit in request.hits or ()), default=0))


class RequestGain:
    """One request, from its classification to its end. `sent` begins each attempt at an engine.

    `refused` or `settled` ends it, once. They return what it earned, None where its tier has no objective, or where it
    was no offered load. `report` is there for a guarded tier, but not for a request that is over its tenant's limits.
    """

    __slots__ = (
        "_admitted_us", "_arrived_us", "_base_us", "_bodies", "_call", "_deadlines", "_first_events", "_last_bodies",
        "_last_us", "_look_at", "_meter", "_now_us", "_objective", "_request", "_since", "_speed", "_step_us", "_tier",
        "_unblocked", "_until", "_usage", "_whole_us", "report",
    )  # fmt: skip

    _speed: EngineSpeed
    _usage: UsageReader

    def __init__(
        self,
        meter: GainMeter,
        request: SizedRequest,
        objective: Objective | None,
        tier: TierGain | None,
        arrived_us: int,
        *,
        report: SloReport | None = None,
    ) -> None:
        self.report = report
        self._meter = meter
        self._now_us = meter.now_us
        self._request = request
        self._objective = objective
        self._tier = tier
        self._arrived_us = arrived_us
        self._admitted_us = 0
        self._call: TimedCall | None = None
        self._deadlines: TokenDeadlines | None = None

    def sent(self, engine_id: str | None, usage: UsageReader) -> UsageReader | RequestGain:
        """The request is sent to an engine, by its id. Returns what reads the answer."""
        request, payload = self._request, self._request.payload
        name = None if engine_id is None else engine_id.partition("#")[0]
        now_us = self._now_us()
        self._speed = speed = self._meter.speeds.engine(name)
        hit = next((tokens for id_, tokens in request.hits or () if id_ == engine_id), 0)
        prompt, tenant = request.prompt_tokens, request.classification.tenant.name
        self._call = speed.sent(
            tenant,
            max(0, prompt - hit),
            now_us,
            sequences=payload.sequences,
            streams=payload.stream,
        )
        self._admitted_us, self._usage = now_us, usage
        if self.report is not None:
            self._whole_us, self._unblocked = now_us, (now_us, 0)
        self._since: GenerationLoad | None = None
        self._until: tuple[GenerationLoad, int] | None = None
        self._bodies, self._first_events, self._look_at = 0, 0, 1
        objective = self._objective
        if objective is None or not payload.stream:
            return usage
        self._deadlines = deadlines = TokenDeadlines(
            objective,
            self._arrived_us,
            tokens_per_event=speed.tokens_per_event,
            sequences=max(1, payload.shown_sequences),
        )
        self._base_us, self._step_us = deadlines.base_us, deadlines.step_us
        self._last_us, self._last_bodies = now_us, (b"", b"")
        return self

    def first_byte(self, status: int | None) -> None:
        """The first byte of the answer is there."""
        call, request, report = self._call, self._request, self.report
        if report is not None:
            self._whole_us = self._now_us()
            if (status or 0) >= 400:
                report.failed()
        if call is None or not request.payload.stream:
            return
        is_sample = (status or 0) < 400 and request.api not in _TOKENS_LATER
        self._since = self._speed.first_token(call, self._now_us(), is_sample=is_sample)

    def taken_back(self) -> None:
        """The attempt is over, and the request waits again."""
        if self._call is not None:
            self._speed.ended(self._call, self._now_us())
        self._call = self._deadlines = None
        if self.report is not None:
            self.report.excuse()

    def check(self) -> None:
        """Reports a first token that is overdue. Call it from time to time, while the client is there."""
        report, is_sent = self.report, self._call is not None
        if report is None or (is_sent and self._deadlines is None):  # its first token will not be seen
            return
        if report.is_overdue(self._now_us(), waits=not is_sent):
            self._report_first(report, is_missed=True)

    def refused(self, status: int | None, *, is_abandoned: bool) -> ServiceGain | None:
        """The request ended while it waited, or before. `status` is None where there was no one to answer."""
        report = self.report
        if report is not None and not is_abandoned and self._call is None and report.ends(self._now_us()):
            self._report_first(report, is_missed=True)
        self.taken_back()
        is_mistake = status is not None and status < FIRST_LATER_STATUS
        return None if is_mistake else self._broken_off(0, is_abandoned=is_abandoned)

    def settled(self, outcome: Outcome, status: int | None, *, is_failure: bool) -> ServiceGain | None:
        """The admitted request is over. `is_failure` says that the answer was not the engine's."""
        now_us, call, deadlines = self._now_us(), self._call, self._deadlines
        if deadlines is not None:
            if self._usage.chunks:
                deadlines.in_time(self._last_us, self._usage.chunks)
            deadlines.end(len(_WITHOUT_TOKEN.findall(b"".join(self._last_bodies))))
        tokens = self._tokens()
        is_answered = not is_failure and (status or 0) < 400
        if call is not None:
            if is_answered:
                self._learn(call, now_us)
            self._speed.ended(call, now_us)
            self._call = None
        objective, tier = self._objective, self._tier
        if objective is None or tier is None:
            return None
        if outcome is not Outcome.COMPLETED or not is_answered:
            is_mistake = outcome is Outcome.COMPLETED and not is_failure and (status or 0) < FIRST_LATER_STATUS
            if is_mistake:
                return None
            return self._broken_off(tokens if is_answered else 0, is_abandoned=outcome is Outcome.CLIENT_LEFT)
        if tokens or self._usage.output_tokens is not None:
            tier.answered(tokens)
        else:  # an answer that does not stream, of an engine that does not count
            tokens = self._meter.expected_tokens(self._request, tier)
        if self.report is not None:
            self._report_answer(self.report, objective, tokens)
        if deadlines is not None:
            return self._earned(deadlines.streamed(tokens))
        return self._earned(TokenDeadlines(objective, self._arrived_us).whole(tokens, self._admitted_us, now_us))

    # -- what the pool is told of a guarded tier

    def _report_first(self, report: SloReport, *, is_missed: bool) -> None:
        """Reports that the first token has come in time, or that it or a whole answer is late."""
        if is_missed and (self._meter.away_until_us >= self._arrived_us or self._is_too_long()):
            report.excuse()
        report.first_token(is_missed=is_missed)

    def _is_too_long(self) -> bool:
        """True if the prompt alone takes an idle engine longer than to the time at which the first token is due.

        By the engine that has the request; of those that it may still be sent to, by the fastest one. While no speed is
        known, it counts as short.
        """
        objective, call, request = self._objective, self._call, self._request
        assert objective is not None
        if call is not None:
            times = [self._speed.computing_us(call.uncached)]
        else:
            uncached = _least_uncached(request)
            times = [engine.computing_us(uncached) for engine in self._meter.speeds.engines.values()]
        return bool(times) and all(time_us is not None and time_us >= objective.ttft_us for time_us in times)

    def _report_answer(self, report: SloReport, objective: Objective, tokens: int) -> None:
        """Reports a complete answer of so many tokens.

        Of a long stream only the beginning is looked at, which does not depend on how fast the client reads. One that
        does not stream is all that is known of its request: where the engine counts its tokens.
        """
        usage, deadlines = self._usage, self._deadlines
        sequences = max(1, self._request.payload.shown_sequences)
        if deadlines is None:
            if usage.output_tokens is not None:
                last_us = report.due_us + max(0, tokens // sequences - 1) * objective.tpot_us
                if self._whole_us >= last_us:
                    self._report_first(report, is_missed=True)
                else:
                    report.complete(is_slow=False)
            return
        later = tokens / sequences - 1
        if deadlines.first_us is None:
            return
        until_us = deadlines.last_us
        if usage.read_bytes > UNBLOCKED_BYTES:
            until_us, events = self._unblocked
            later = (events - self._first_events) * tokens / deadlines.events / sequences
        report.complete(is_slow=deadlines.is_slow(until_us, later))

    # -- the answer as it passes

    def feed(self, body: bytes) -> bool:
        """See `UsageReader.feed`. Of a chunk in time, only its time is kept.

        Each event makes the next one due later. So a chunk that would be in time without those that are not counted yet
        is in time, and they are counted together.
        """
        usage = self._usage
        self._last_us = now_us = self._now_us()
        self._last_bodies = self._last_bodies[1], body
        self._bodies += 1
        before = usage.chunks
        if self._bodies >= self._look_at or now_us >= self._base_us + before * self._step_us:
            usage.read()
            before = usage.chunks
            usage.feed(body)
            usage.read()
        elif not usage.feed(body):
            return False
        if self.report is not None and usage.read_bytes <= UNBLOCKED_BYTES:
            self._unblocked = now_us, usage.chunks
        if now_us >= self._base_us + before * self._step_us or usage.chunks >= self._look_at:
            self._look(now_us, before, usage.chunks)
        return True

    def _look(self, now_us: int, before: int, events: int) -> None:
        """At the first events, at late ones, and when so many have come that the speed is known."""
        deadlines = self._deadlines
        if deadlines is None or events <= before:
            return
        if events >= self._look_at:
            if self._first_events:
                self._until, self._look_at = (self._speed.load(now_us), events), _NEVER
            elif self._is_opening(events):
                deadlines.skip(events)
                self._base_us, self._look_at = deadlines.base_us, events + 1
                return
            else:
                self._first_events, self._look_at = events, events + LOOK_AFTER
                deadlines.read(now_us, events)
                if self.report is not None:
                    self._report_first(self.report, is_missed=now_us >= self.report.due_us)
                return
        deadlines.in_time(now_us, before)
        deadlines.read(now_us, events)

    def _is_opening(self, events: int) -> bool:
        """True if the answer has no token yet."""
        body = bytes(self._last_bodies[1])  # Starlette lets apps send a memoryview
        if self._request.api in _TOKENS_LATER:
            return _DELTA not in body
        return events == 1 and _EMPTY.search(body) is not None

    # -- the end

    def _tokens(self) -> int:
        """The tokens of the answer so far, of all its sequences: the engine's count, or else those of its events."""
        if self._call is None:
            return 0
        usage, deadlines, request = self._usage, self._deadlines, self._request
        events = usage.chunks if deadlines is None else deadlines.events
        counted = usage.output_tokens
        if counted is None or (deadlines is not None and usage.later_chunks):
            return max(counted or 0, round(events * self._speed.tokens_per_event))
        # A tool that the client wrote, repeated in the answer, may look like a count of any size.
        if deadlines is not None:
            return min(counted, round(events * MOST_TOKENS_PER_EVENT))
        most = request.assumed_output if request.expected is None else request.expected.longest
        return min(counted, most * request.payload.shown_sequences)

    def _learn(self, call: TimedCall, now_us: int) -> None:
        """The times of an answer's tokens, where it was seen to stream."""
        usage, since, deadlines = self._usage, self._since, self._deadlines
        if deadlines is None or not deadlines.events:
            return
        if usage.output_tokens is not None and not usage.later_chunks:
            self._speed.counted(usage.output_tokens, deadlines.events)
        if since is None or self._request.payload.sequences != 1:
            return
        if self._until is not None:
            until, events = self._until
            intervals = (events - self._first_events) * self._speed.tokens_per_event
        else:
            until, intervals = self._speed.load(now_us), float(self._tokens() - 1)
        self._speed.tokens_came(call, since, until, intervals)

    def _broken_off(self, tokens: int, *, is_abandoned: bool) -> ServiceGain | None:
        objective, tier = self._objective, self._tier
        if objective is None or tier is None:
            return None
        deadlines = self._deadlines or TokenDeadlines(objective, self._arrived_us)
        expected = self._meter.expected_tokens(self._request, tier)
        return self._earned(deadlines.broken_off(tokens, expected, is_abandoned=is_abandoned))

    def _earned(self, gain: Earned) -> ServiceGain:
        if self._tier is not None:
            self._tier.add(gain)
        return ServiceGain(gain.earned, gain.attainable, gain.outcome._value_)
