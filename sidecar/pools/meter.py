"""A replica's side of its tenants' limits: what it asks about requests that come, and tells of those that ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

import msgspec

from sidecar.pools.bids import Bids
from sidecar.pools.calls import BIDS_SHOWN, Call, ChargeSettled, Metered, MeterVerdict, Running
from sidecar.pools.ledger import Ledger
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.rate_limit import FULLEST, Charge
from sidecar.scheduling.tickets import Ticket


class Judged(NamedTuple):
    """The verdict on a request, by the limits that it was asked about: those of the replica's part while it is alone.

    Of several accounts that of the first; one that is refused is judged by the limit that it exceeds longest. It does
    not wait any more.
    """

    asked: Metered
    verdict: MeterVerdict

    @property
    def exceeds_us(self) -> int:
        """For how long it exceeds a limit; -1 where it exceeds none."""
        if self.verdict.over is None:
            return -1
        return FULLEST if self.verdict.after_us is None else self.verdict.after_us


@dataclass
class _Question:
    """One question for each account of a request.

    `ticket` is that of the request, None where nothing is to be charged. It waits from when the question is sent.
    """

    asked: Sequence[Metered]
    ticket: Ticket | None
    is_sent: bool = False


@dataclass
class _Ended:
    """A charged request that ended, for the ledger that charged it: None for that of the pool."""

    record: ChargeSettled
    ledger: Ledger | None


class Meter:
    """Its questions travel with the `bids`, which get the ticket of a question as soon as that is sent.

    `call_by` says when there is something to tell: of what has ended `lazy_us` later.
    """

    def __init__(self, bids: Bids, call_by: Callable[[int], None], lazy_us: int) -> None:
        self._bids, self._call_by, self._lazy_us = bids, call_by, lazy_us
        self._questions: dict[int, _Question] = {}
        self._charges: dict[int, tuple[Sequence[Charge], Ledger | None]] = {}
        self._running = Counter[str]()
        self._fallen: set[str] = set()
        self._ended: list[_Ended] = []

    @property
    def has_questions(self) -> bool:
        """True if requests wait for a verdict."""
        return bool(self._questions)

    @property
    def has_news(self) -> bool:
        """True if there is something to send that was not sent yet."""
        return bool(self._fallen) or any(it.ledger is None and not it.record.first_call for it in self._ended)

    @property
    def is_idle(self) -> bool:
        """True if nothing is asked, and nothing is to be sent."""
        return not self.has_questions and not self.has_news

    def ask(self, asked: Sequence[Metered], ticket: Ticket | None, now_us: int) -> None:
        """A request came, with a question for each of its accounts. Its ticket is not to wait before."""
        self._questions[asked[0].number] = _Question(asked, ticket)
        self._call_by(now_us)

    def give_up(self, number: int) -> bool:
        """Its client left before the verdict. Returns whether no ticket of it waits yet."""
        question = self._questions.pop(number, None)
        return question is not None and (question.ticket is None or not question.is_sent)

    def settle(self, number: int, used: int | None, now_us: int, *, is_counted: bool, was_held: bool) -> None:
        """A request has ended. Nothing changes where it was not charged."""
        charges, ledger = self._charges.pop(number, ((), None))
        for charge in charges:
            self._running[charge.tenant] -= 1
            used = None if used is None else max(0, min(used, UNBOUNDED))
            self._end(ChargeSettled(0, charge, used, is_counted, was_held), ledger)
            self._call_by(now_us + self._lazy_us)

    def _end(self, record: ChargeSettled, ledger: Ledger | None) -> None:
        self._fallen.add(record.charge.tenant)
        self._ended.append(_Ended(record, ledger))

    def put(self, call: Call, ledger: Ledger | None = None, replicas: int = 1) -> None:
        """Puts questions and news into a call to a ledger, which has one of so many parts of the limits."""
        is_statement = call.kind == "state"
        self._ended = [it for it in self._ended if it.ledger is None or it.ledger is ledger]
        tenants = sorted(self._running if is_statement else self._fallen)
        call.running = [Running(tenant, self._running[tenant]) for tenant in tenants]
        self._fallen.clear()
        self._running = +self._running
        for ended in self._ended:
            if ended.ledger is ledger and (is_statement or not ended.record.first_call):
                first_call = ended.record.first_call or call.number
                ended.record = msgspec.structs.replace(ended.record, first_call=first_call)
                call.settled.append(ended.record)
        for question in islice(self._questions.values(), BIDS_SHOWN):
            if question.ticket is not None and not question.is_sent:
                self._bids.add(question.ticket)
            question.is_sent = True
            call.metered += [_part(asked, replicas) for asked in question.asked]

    def take(self, call: Call, verdicts: list[MeterVerdict], ledger: Ledger | None = None) -> list[Judged]:
        """The verdicts of an answered call."""
        answered = range(1, call.number + 1)
        self._ended = [it for it in self._ended if it.ledger is not ledger or it.record.first_call not in answered]
        found: list[Judged] = []
        for number, group in groupby(map(Judged, call.metered, verdicts), lambda judged: judged.verdict.number):
            judged = list(group)
            question = self._questions.pop(number, None)
            charges = [charge for _, verdict in judged if (charge := verdict.charge) is not None]
            if question is None:
                for charge in charges:
                    self._end(ChargeSettled(0, charge, 0, is_counted=True, was_held=False), ledger)
                continue
            worst = max(judged, key=lambda it: it.exceeds_us)
            if charges:
                self._charges[number] = charges, ledger
                self._running.update(charge.tenant for charge in charges)
            elif worst.verdict.over is not None and question.ticket is not None:
                self._bids.drop(question.ticket)
            found.append(worst)
        return found


def _part(asked: Metered, replicas: int) -> Metered:
    """The question by one of `replicas` equal parts of the limits, at least one of each."""
    if replicas == 1:
        return asked
    requests, tokens, concurrent = (
        None if limit is None else max(1, limit // replicas)
        for limit in (asked.requests_per_minute, asked.tokens_per_minute, asked.concurrent)
    )
    return msgspec.structs.replace(asked, requests_per_minute=requests, tokens_per_minute=tokens, concurrent=concurrent)
