"""What the tests of fleets share."""

from __future__ import annotations

import pytest

from sidecar.engines import watch as engine_watch


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is down is asked every 50 ms, so that no test waits for its return."""
    monkeypatch.setattr(engine_watch, "RETRY_EVERY_S", 0.05)
