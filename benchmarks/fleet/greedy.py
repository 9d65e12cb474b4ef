"""`sidecar ...` with greedy placement: the first in order takes whichever engine has room, and nothing claims.

It exists for the comparison alone; no option of the sidecar does this. Of the engines with room a ticket takes the one
with the best score. Where none has room for the first ticket, the walk ends: it holds up all that come after it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from sidecar.cli import main


def make_greedy() -> None:
    """Replaces the choice of an engine in this process. Raises ImportError where the sidecar places nothing."""
    placement: Any = importlib.import_module("sidecar.scheduling.placement")
    best_of_all = placement.Placement.best

    def best(self: Any, tokens: int, requests: int, placing: Any) -> Any:
        """As `Placement.best`, but of the engines with room, as long as there are any."""
        with_room = [
            ledger for ledger in self.usable(tokens, requests, placing) if ledger.has_room(tokens, requests, placing)
        ]
        return self._best_of(with_room, placing) if with_room else best_of_all(self, tokens, requests, placing)

    placement.Placement.best = best
    for name, module in list(sys.modules.items()):  # a walk that looks at one ticket leaves nothing to claim
        if name.startswith("sidecar.scheduling") and hasattr(module, "MOST_PLACED"):
            module.MOST_PLACED = 1  # type: ignore[attr-defined]  # the module was found by its name


if __name__ == "__main__":
    make_greedy()
    sys.exit(main())
