"""One overload for all tests that ask a Prometheus about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.otel.overload import Overloaded, overloaded


@pytest.fixture(scope="session")
def overload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overloaded]:
    """It is over when a test sees it; Prometheus still answers for the time when it was at its height."""
    with overloaded(tmp_path_factory.mktemp("overload")) as seen:
        yield seen
