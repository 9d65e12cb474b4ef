"""News of a replica that its ledger adds up."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.pools.calls import Call, Cap, Charge, Drain, Owed


@dataclass
class Told:
    """Something that the ledger adds up: it is sent once, and again with a statement if no answer came."""

    record: Charge | Owed | Drain | Cap
    number: int = 0

    def put(self, call: Call) -> None:
        """Puts it into a call."""
        if isinstance(self.record, Charge):
            call.charges = [*call.charges, self.record]
        elif isinstance(self.record, Owed):
            call.owes = [*call.owes, self.record]
        elif isinstance(self.record, Drain):
            call.drains = [*call.drains, self.record]
        else:
            call.caps = [*call.caps, self.record]
