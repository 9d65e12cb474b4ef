"""One admitted request whose engine takes no longer than the `timeouts` of its tier.

The app learns it as it learns that a client has disconnected, because every serving app aborts its engine then. One
that has not ended within the policy's `disconnect_grace` is canceled. What it still sends is dropped, and its client
gets the error: a 504, or the end of an answer that has begun. The request is never sent again, since the engine may
work on it.
"""

from __future__ import annotations

import asyncio

from sidecar.apis import Api
from sidecar.errors import EngineTimeout
from sidecar.events import Outcome
from sidecar.middleware.engine_time import EngineTime, break_off
from sidecar.middleware.error_responses import send_error
from sidecar.middleware.request import RequestHandler
from sidecar.middleware.stages import Stage
from sidecar.tasks import is_canceled_again


class TimedRequest(RequestHandler):
    """Handles one request to a guarded endpoint. A response that runs on in the background has a time of its own."""

    def check(self) -> None:
        """See `Watched`. Also ends a request that the engine takes too long for."""
        super().check()
        if self.stage is not Stage.RUNNING or self._background is not None:
            return
        if self._overdue is not None:
            self._check_app()
        elif self._client.disconnected_us is None and self._is_at_engine():
            self._check_engine()

    def _is_at_engine(self) -> bool:
        """Whether the engine has the request, and not yet answered it to the end."""
        is_preempted = self._attempt is not None and self._attempt.is_lost
        return self._call.may_run and not self._call.is_handed_back and not is_preempted

    def _check_engine(self) -> None:
        now_us, grant = self._now_us(), self._lease.grant
        if self._engine_time is None:
            timeouts = self._snapshot.policy.tiers[self._request.classification.level].timeouts
            since_us = now_us if grant is None else grant.at_us
            streams = self._request.payload.stream
            self._engine_time = EngineTime(timeouts, self._usage, self._client, since_us, streams=streams)
        self._overdue = self._engine_time.exceeded(now_us)
        if self._overdue is None:
            return
        if self._status is None:
            self._call.error = self._overdue
        self._passing = None
        self._client.cut()

    def _check_app(self) -> None:
        """Cancels an app that does not end, though it was told that its client has left."""
        cut_us, grace_us = self._client.cut_us, self._snapshot.policy.disconnect_grace_s * 1e6
        if self._task is not None and cut_us is not None and self._now_us() - cut_us > grace_us:
            self._timed_out = True
            self._settle(Outcome.FAILED, EngineTimeout.code)
            self._task.cancel()

    async def _has_failed(self, error: Exception) -> bool:
        """See `RequestHandler`. What the app makes of its end is not passed on."""
        return self._overdue is None and await super()._has_failed(error)

    async def _waits_again(self) -> bool:
        """See `RequestHandler`. Not an overdue request."""
        if self._overdue is None:
            return await super()._waits_again()
        await self._answer(self._overdue)
        return False

    async def _has_answered(self, canceled: asyncio.CancelledError) -> bool:
        """See `RequestHandler`."""
        if self._overdue is None or not self._timed_out or is_canceled_again(self._task):
            return await super()._has_answered(canceled)
        await self._answer(self._overdue)
        return True

    async def _answer(self, error: EngineTimeout) -> None:
        if self._status is None:
            self._call.error, self._overdue = error, None
            await send_error(self._send_for_app, error, anthropic=self._endpoint.api is Api.MESSAGES)
            return
        self._settle(Outcome.FAILED, error.code)
        streams = self._request.payload.stream and self._status < 400
        await break_off(self._client, error, self._endpoint.api, self._usage, streams=streams)
