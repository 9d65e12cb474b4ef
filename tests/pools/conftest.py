"""The pools that are held to the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pools.pools import Harness, LocalHarness

HARNESSES: dict[str, Callable[[], Harness]] = {"local": LocalHarness}


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest) -> Harness:
    return HARNESSES[request.param]()
