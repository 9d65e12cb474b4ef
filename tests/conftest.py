"""What every test may use."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.support.signals import restore_for_children

# A deadline for each example measures the machine, which runs other tests beside this one.
settings.register_profile("no deadline", deadline=None)
# For `.ci/run`: what fails there is the change's own.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("no deadline")
restore_for_children()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
