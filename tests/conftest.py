"""What every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support import stages
from tests.support.signals import restore_for_children

# A deadline for each example measures the machine, which runs other tests beside this one.
settings.register_profile("no deadline", deadline=None)
# For `.ci/run`: what fails there is the change's own.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("no deadline")
restore_for_children()
# Engines of tests answer what a test is about, and count what comes. `tests/cli/test_serve_check.py` turns it on.
os.environ.setdefault("SIDECAR_SERVE_NO_CHECK", "1")
stages.check_every_step()


@pytest.fixture(autouse=True)
def every_request_keeps_to_its_stages() -> Iterator[None]:
    """See `sidecar.middleware.stages`."""
    stages.entered.clear()
    yield
    assert not stages.wrong


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
