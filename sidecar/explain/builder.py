"""Builder of a request's explanation, from the records that the journal keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sidecar.events import Admitted
from sidecar.explain.document import (
    AdmissionDetails,
    AdmittedAhead,
    AttemptDetails,
    DryRunDetails,
    Ending,
    EngineChoice,
    Explanation,
    FirstByteDetails,
    ObstacleDetails,
    RefusalDetails,
    RequestFacts,
    SizeDetails,
    WaitDetails,
)
from sidecar.explain.phrases import conclusion
from sidecar.telemetry.ahead import aged_to, because, new_groups, rule_for, unseen, without_own_runs
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.request_record import JITTER_US, RequestRecord, engine_name, engine_time_us

MOST_LISTED = 64
"""Most of those ahead that are listed one by one; the groups count them all."""


@dataclass(frozen=True, slots=True)
class ExplanationBuilder:
    """Builds explanations. `tiers` are the names of the policy in force, most important first; `is_shared` says that
    other replicas admit out of the same pool.
    """

    journal: Journal
    tiers: Callable[[], Sequence[str]]
    pool: str
    is_shared: bool

    def explain(self, request_or_trace_id: str) -> Explanation | None:
        """The newest request of this id, None where none is kept."""
        found = self.journal.all_for(request_or_trace_id)
        return self.story(found[0], others=len(found) - 1) if found else None

    def story(self, record: RequestRecord, others: int = 0) -> Explanation:
        """Everything that is known of it now."""
        trace = record.trace
        now_us = self.journal.now_us()
        story = Explanation(
            request_id=record.request_id,
            conclusion="",
            state=describe_state(record),
            pool=self.pool,
            told_at_s=time.time(),
            method=record.method,
            path=record.path,
            arrived_at_s=record.wall_s(record.at_us),
            trace_id=None if trace is None else f"{trace.trace_id:032x}",
            span_id=None if trace is None else f"{trace.span_id:016x}",
            others=others,
            asked=None
            if record.classified is None
            else msgspec.convert(record.classified, RequestFacts, from_attributes=True),
            in_the_way=_in_the_way(record),
            wait=self._describe_wait(record, now_us),
            preempted=_gave_way(record, now_us),
            admitted=self._let_in(record),
            answered=None
            if record.first_byte is None
            else FirstByteDetails(record.wall_s(record.first_byte.at_us), record.first_byte.status),
            ended=_describe_end(record),
            refused=_turned_away(record),
            dry_run=_dry_run(record),
            size=_size(record),
        )
        return msgspec.structs.replace(story, conclusion=conclusion(story))

    def _let_in(self, record: RequestRecord) -> AdmissionDetails | None:
        admitted, classified = record.admitted, record.classified
        if admitted is None or classified is None:
            return None
        risen_to = aged_to(classified.tier, admitted.level, self.tiers())
        at_s, engine = record.wall_s(admitted.at_us), _engine(admitted)
        return AdmissionDetails(at_s, admitted.level, risen_to, admitted.engine_priority, engine)

    def _describe_wait(self, record: RequestRecord, now_us: int) -> WaitDetails | None:
        """None where it did not wait."""
        waited = record.waited
        if record.classified is None or (record.queued is None if waited is None else not waited.queue_wait_us):
            return None
        counted = self.journal.find_ahead(record)
        records = without_own_runs(counted, record)
        if waited is not None:
            wait_us, starvation_us, overtaken_us = waited.queue_wait_us, waited.starvation_us, waited.overtaken_at_us
        else:
            later = (each.waited for each in records if each.arrived_us > record.arrived_us)
            overtaken_us = next((admitted.at_us for admitted in later if admitted is not None), None)
            wait_us = now_us - record.arrived_us
            starvation_us = 0 if overtaken_us is None else now_us - overtaken_us
        return WaitDetails(
            queue_wait_s=wait_us / 1e6,
            starvation_s=starvation_us / 1e6,
            overtaken_at_s=None if overtaken_us is None else record.wall_s(overtaken_us),
            overtaken_by=self._overtaken_by(records, record, overtaken_us),
            groups=new_groups(records, record, self.tiers()),
            unseen=[] if waited is None else unseen(waited, counted, self.journal, is_shared=self.is_shared),
            first=[self._ahead(each, record) for each in records[:MOST_LISTED]],
        )

    def _ahead(self, ahead: RequestRecord, record: RequestRecord) -> AdmittedAhead:
        classified, admitted = ahead.classified, ahead.admitted
        assert classified is not None
        assert admitted is not None
        rule = rule_for(ahead, record)
        return AdmittedAhead(
            request_id=ahead.request_id,
            trace_id=None if ahead.trace is None else f"{ahead.trace.trace_id:032x}",
            tier=classified.tier,
            tenant=classified.tenant,
            tokens=classified.tokens,
            came_later=ahead.arrived_us > record.arrived_us,
            rule=rule,
            because=because(rule, ahead, record, self.tiers()),
            arrived_at_s=ahead.wall_s(ahead.at_us),
            admitted_at_s=ahead.wall_s(admitted.at_us),
        )

    def _overtaken_by(
        self, records: Sequence[RequestRecord], record: RequestRecord, overtaken_us: int | None
    ) -> AdmittedAhead | None:
        """The first that had come later, if it was here: at another replica, or too long ago, it may not have been."""
        first = next((each for each in records if each.arrived_us > record.arrived_us), None)
        if first is None or first.admitted is None or overtaken_us is None:
            return None
        return self._ahead(first, record) if first.admitted.at_us <= overtaken_us + JITTER_US else None


def _engine(admitted: Admitted) -> EngineChoice | None:
    """The engine that it got; None in a pool of one."""
    if admitted.engine is None:
        return None
    name, placed = engine_name(admitted.engine), admitted.placed
    if placed is None:
        return EngineChoice(name, admitted.engine)
    return EngineChoice(
        engine=name,
        id=admitted.engine,
        capacity_tokens=placed.capacity_tokens,
        capacity_requests=placed.capacity_requests,
        held_tokens=placed.held_tokens,
        held_requests=placed.held_requests,
        unprefilled_tokens=placed.unprefilled_tokens,
        prompt_tokens=placed.prompt,
        hit=dict(placed.hits).get(admitted.engine, 0),
        other_hits={engine_name(other): hit for other, hit in placed.hits if other != admitted.engine},
        claimed_s=placed.claimed_us / 1e6,
    )


def describe_state(record: RequestRecord) -> str:
    """In a word, how far the request has come."""
    if record.refused is not None:  # also where it was settled: it was preempted, and not admitted again
        return "abandoned" if record.refused.status is None else "refused"
    if record.settled is not None:
        return record.settled.outcome.value
    if record.admitted is not None:
        return "running"
    return "arriving" if record.queued is None else "waiting"


def _gave_way(record: RequestRecord, now_us: int) -> list[AttemptDetails]:
    end = record.waited
    ends_us = [*(lost.admitted.at_us for lost in record.lost[1:]), now_us if end is None else end.at_us]
    began_us = [record.arrived_us, *(lost.preempted.at_us for lost in record.lost)]
    return [
        AttemptDetails(
            admitted_at_s=record.wall_s(lost.admitted.at_us),
            preempted_at_s=record.wall_s(lost.preempted.at_us),
            queue_wait_s=0.0 if lost.queued is None else (lost.admitted.at_us - since_us) / 1e6,
            engine_s=engine_time_us(lost.preempted) / 1e6,
            waited_again_s=(end_us - lost.preempted.at_us) / 1e6,
            is_unreached=lost.preempted.is_unreached,
            replay=None if lost.replayed is None else lost.replayed.reason.value,
            engine=None if lost.admitted.engine is None else engine_name(lost.admitted.engine),
        )
        for lost, since_us, end_us in zip(record.lost, began_us, ends_us, strict=False)
    ]


def _in_the_way(record: RequestRecord) -> ObstacleDetails | None:
    """The cause of its first wait; a later wait is caused by a preemption."""
    queued = record.lost[0].queued if record.lost else record.queued
    if queued is None:
        return None
    return ObstacleDetails(record.wall_s(queued.at_us), queued.obstacle.value, queued.explanation)


def _describe_end(record: RequestRecord) -> Ending | None:
    settled = record.settled
    if settled is None:
        return None
    return Ending(
        settled_at_s=record.wall_s(settled.at_us),
        outcome=settled.outcome.value,
        status=settled.status,
        tokens_used=settled.tokens_used,
        input_tokens=settled.input_tokens,
        cached_tokens=settled.cached_tokens,
        output_tokens=settled.output_tokens,
        error=settled.error,
    )


def _size(record: RequestRecord) -> SizeDetails | None:
    """None where no output length is learned."""
    classified, settled = record.classified, record.settled
    if classified is None or classified.expected is None:
        return None
    size = msgspec.convert(classified.expected, SizeDetails, from_attributes=True)
    if settled is None:
        return size
    return msgspec.structs.replace(size, held_tokens=settled.held_tokens, growths=settled.growths)


def _dry_run(record: RequestRecord) -> DryRunDetails | None:
    observed = record.observed
    if observed is None:
        return DryRunDetails() if record.admitted is not None and record.admitted.is_dry_run else None
    wait_s, starvation_s = observed.queue_wait_us / 1e6, observed.starvation_us / 1e6
    return DryRunDetails(observed.verdict.value, observed.code, wait_s, starvation_s)


def _turned_away(record: RequestRecord) -> RefusalDetails | None:
    refused = record.refused
    if refused is None:
        return None
    return RefusalDetails(
        record.wall_s(refused.at_us),
        refused.status,
        refused.code,
        refused.message,
        record.tenant,
        record.tier,
        record.key,
    )
