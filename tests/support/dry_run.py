"""A dry run of an app, and everything that it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sidecar.events import Observed, Verdict
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from tests.support.middleware import Guarded, monitor, policy
from tests.support.serving import serving


class DryRun(Guarded):
    """A controller in `mode: observe`."""

    def __init__(self, app: Any, with_policy: Policy) -> None:
        super().__init__(app, replace(with_policy, mode=Mode.OBSERVE))
        self.found: list[Observed] = []
        monitor(self.sidecar, observed=self.found.append)

    def verdicts(self) -> list[tuple[Verdict, str | None]]:
        """What became of every request, in the order in which that was known."""
        return [(one.verdict, one.code) for one in self.found]

    async def until_found(self, count: int) -> list[Observed]:
        """Waits until it is known what would have become of so many requests."""
        end_s = time.monotonic() + self.patience_s
        while len(self.found) < count:
            assert time.monotonic() < end_s, self.found
            await asyncio.sleep(0.001)
        return self.found

    async def no_shadow_left(self) -> None:
        """Fails unless the pool is empty, at once or very soon, and every request was reported once."""
        await self.until(leases=0, waiting=0)
        end_s = time.monotonic() + self.patience_s
        while (len(self.sidecar.shadows) or len(self.sidecar.watchdog)) and time.monotonic() < end_s:  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0.001)
        assert (len(self.sidecar.shadows), len(self.sidecar.watchdog)) == (0, 0)
        ids = [one.request_id for one in self.found]
        assert len(ids) == len(set(ids)) == len(self.recorder.stories)
        assert all(
            story.kinds.count("Settled") == 1 and story.kinds[-1] == "Settled" for story in self.recorder.stories
        )


@asynccontextmanager
async def observing(app: Any, with_policy: Policy | None = None, **settings: Any) -> AsyncIterator[DryRun]:
    """Serves `app` in a dry run; at the end of the block nothing may be left of any shadow."""
    observed = DryRun(app, with_policy or policy())
    async with serving(observed.sidecar, **settings) as observed.served:
        yield observed
        await observed.no_shadow_left()
