"""What guarded tiers met in the last five minutes, of counts that only grow."""

from __future__ import annotations

import msgspec

from sidecar.cluster.document import TierGuard
from sidecar.cluster.report import GuardHistory
from tests.cluster.views import tier


def test_the_last_five_minutes_count() -> None:
    history, plain = GuardHistory(), tier("batch", 1)
    guard = TierGuard(0.1, 0.0, 0.0, {"met": 0, "missed": 0}, is_in_vain=False)

    def at(seconds: float, met: int, missed: int) -> tuple[int, int]:
        now = tier("chat", guard=msgspec.structs.replace(guard, requests={"met": met, "missed": missed}))
        history.note([now, plain], seconds)
        return history.lately(now)

    assert at(1000, 40, 2) == (0, 0)  # before it began to look, nobody knows when
    assert at(1001, 50, 2) == (10, 0)
    assert [at(1000 + 5 * n, 40 + n, 2) for n in (20, 40, 60)] == [(20, 0), (40, 0), (60, 0)]
    assert at(1400, 120, 8) == (80 - 20, 6)  # since 1100
    assert at(2000, 120, 8) == (0, 0)


def test_a_tier_that_is_guarded_no_longer_is_forgotten() -> None:
    history = GuardHistory()
    chat = tier("chat", guard=TierGuard(0.1, 0.0, 0.0, {"met": 5, "missed": 1}, is_in_vain=False))
    history.note([chat], 1.0)
    history.note([tier("chat")], 2.0)
    assert history.lately(chat) == (5, 1)
