"""What every test may use."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A deadline for each example measures the machine, which runs other tests beside this one.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
