"""News of a replica that its ledger adds up."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sidecar.pools.calls import Call, Cap, Drain, LeaseGrowth, Owed, SloSeen


@dataclass
class NewsItem:
    """Something that the ledger adds up: it is sent once, and again with a statement if no answer came.

    `number` is that of the first call that had it, 0 for none: a call that was applied is not applied twice.
    """

    record: LeaseGrowth | Owed | SloSeen | Drain | Cap
    number: int = 0

    def put(self, call: Call) -> None:
        """Puts it into a call."""
        if isinstance(self.record, LeaseGrowth):
            call.charges = [*call.charges, msgspec.structs.replace(self.record, first_call=self.number)]
        elif isinstance(self.record, Owed):
            call.owes = [*call.owes, msgspec.structs.replace(self.record, first_call=self.number)]
        elif isinstance(self.record, SloSeen):
            call.seen = [*call.seen, msgspec.structs.replace(self.record, first_call=self.number)]
        elif isinstance(self.record, Drain):
            call.drains = [*call.drains, self.record]
        else:
            call.caps = [*call.caps, self.record]
