"""News of a replica that its ledger adds up."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sidecar.pools.calls import Call, Cap, Charge, Drain, Owed


@dataclass
class _Told:
    """Something that the ledger adds up: it is sent once, and again with a statement if no answer came.

    `number` is that of the first call that had it, 0 for none: a call that was heard is not heard twice.
    """

    record: Charge | Owed | Drain | Cap
    number: int = 0

    def put(self, call: Call) -> None:
        """Puts it into a call."""
        if isinstance(self.record, Charge):
            call.charges = [*call.charges, msgspec.structs.replace(self.record, told_with=self.number)]
        elif isinstance(self.record, Owed):
            call.owes = [*call.owes, msgspec.structs.replace(self.record, told_with=self.number)]
        elif isinstance(self.record, Drain):
            call.drains = [*call.drains, self.record]
        else:
            call.caps = [*call.caps, self.record]


class News:
    """All of them, from when they happen until they are answered."""

    def __init__(self) -> None:
        self._all: list[_Told] = []

    @property
    def is_new(self) -> bool:
        """Whether there is something that no call has said."""
        return any(told.number == 0 for told in self._all)

    def add(self, record: Charge | Owed | Drain | Cap) -> None:
        """Something to tell."""
        self._all.append(_Told(record))

    def put(self, call: Call) -> None:
        """Puts what is due into a call."""
        for told in self._all:
            if told.number == 0 or call.kind == "state":
                told.number = told.number or call.number
                told.put(call)

    def heard(self, number: int) -> None:
        """The call of this number is answered, and so is what was told before."""
        self._all = [told for told in self._all if told.number == 0 or told.number > number]

    def drains(self) -> dict[str, Drain]:
        """The operators' words that are not answered, by engine."""
        return {told.record.engine: told.record for told in self._all if isinstance(told.record, Drain)}

    def take_caps(self) -> list[Cap]:
        """The caps, which no other ledger is told."""
        caps = [told.record for told in self._all if isinstance(told.record, Cap)]
        self._all = [told for told in self._all if not isinstance(told.record, Cap)]
        return caps
