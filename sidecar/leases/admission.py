"""Leases for coroutines: `async with admission.lease(tier="batch", tokens=4_000) as lease`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from types import TracebackType
from typing import TypeVar

from sidecar.admission.controller import AdmissionController
from sidecar.leases.held_lease import HeldLease, LeasePreempted
from sidecar.leases.lease_request import LeaseRequest

T = TypeVar("T")


class Admission:
    """Admission to one pool, for code that calls the engine itself. Use it in the event loop of its pool.

    `AdmissionMiddleware.admission` is that of a middleware, `sidecar.connect` joins a shared pool from any process.
    """

    def __init__(self, controller: AdmissionController) -> None:
        self.controller = controller

    def lease(
        self,
        *,
        tokens: int,
        tier: str | None = None,
        tenant: str | None = None,
        requests: int = 1,
        prompt_tokens: int = 0,
        max_wait_s: float | None = None,
        is_preemptible: bool = True,
        model: str | None = None,
        deadline: datetime | timedelta | None = None,
    ) -> LeaseBlock:
        """A lease of so many tokens, prompt and output, and `requests` sequences, for the block of an `async with`.

        `tier` and `tenant` are names of the policy. Without a tier it is the tenant's own. A tenant has its limits, and
        its `max_tier`; without a tenant it is the operator's own work, called `internal`, in any tier. `prompt_tokens`
        are a part of `tokens`, for pools of several engines that bound what is prefilled.
        The wait takes at most `max_wait_s` seconds, and at most as long as the tier allows. With a `deadline`, in a
        tier that has `queue.max_deadline`, it ends then instead, with DeadlinePassed, and rises to better tiers as that
        comes near: a time with its zone, or a time from now. In a tier that the policy
        calls preemptible the block is canceled where a more important request needs the room before
        `HeldLease.keep` is called: it ends with LeasePreempted. `model` names the pool where the policy has `models`.

        Raises ValueError for what the policy does not have, at once, and TenantsUnavailable for a tenant that may be
        one of the store's, while those were not read. The block's beginning raises the refusals of HTTP requests:
        RequestTooLarge, TenantLimit, QueueFull, QueueTimeout, DeadlinePassed, NoEngine, StoreUnavailable,
        CapacityUnknown, Draining.
        """
        asked = LeaseRequest(tier, tokens, tenant, requests, prompt_tokens, max_wait_s, is_preemptible, model, deadline)
        return LeaseBlock(self.held_lease(asked))

    async def run(
        self,
        work: Callable[[HeldLease], Awaitable[T]],
        *,
        tokens: int,
        tier: str | None = None,
        tenant: str | None = None,
        requests: int = 1,
        prompt_tokens: int = 0,
        max_wait_s: float | None = None,
        model: str | None = None,
        deadline: datetime | timedelta | None = None,
    ) -> T:
        """The result of `await work(lease)`, with a lease as `lease` makes it.

        Where it is preempted, `work` is canceled and called again as soon as it is admitted once more, with the place
        in the queue that it had.
        """
        request = LeaseRequest(tier, tokens, tenant, requests, prompt_tokens, max_wait_s, True, model, deadline)
        held = self.held_lease(request)
        task: asyncio.Future[T] | None = None

        def preempt() -> None:
            if task is not None:
                task.cancel()

        await held.acquire(preempt)
        try:
            while True:
                task = asyncio.ensure_future(_result(work, held))
                await _ended(task)
                if not (held.is_preempted and task.cancelled()):
                    break
                await held.acquire_again()
            result = task.result()
        except BaseException as error:
            held.release(error)
            raise
        held.release()
        return result

    def held_lease(self, request: LeaseRequest) -> HeldLease:
        """A lease that was not acquired yet. Raises ValueError for what the policy does not have."""
        controller = self.controller
        if controller.controllers:
            names = ", ".join(controller.controllers)
            if request.model is None or request.model not in controller.controllers:
                raise ValueError(f"model: the policy has a pool for each of {names}, and none for {request.model!r}")
            controller = controller.controllers[request.model]
        return HeldLease(controller, request)


class LeaseBlock:
    """The block in which a lease is held. It is used once."""

    def __init__(self, held: HeldLease) -> None:
        self._held = held
        self._task: asyncio.Task[object] | None = None
        self._canceled_before = 0
        self._is_canceled = False

    async def __aenter__(self) -> HeldLease:
        if self._task is not None:
            raise RuntimeError("the lease was used already: make one for each block")
        task = self._task = asyncio.current_task()
        assert task is not None
        await self._held.acquire(self._preempt)
        if sys.version_info >= (3, 11):
            self._canceled_before = task.cancelling()
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.release(error)
        if self._is_canceled and self._is_only_ours() and isinstance(error, asyncio.CancelledError):
            raise LeasePreempted("a more important request needed the lease's room; take another lease") from error

    def _preempt(self) -> None:
        assert self._task is not None
        self._is_canceled = True
        self._task.cancel()

    def _is_only_ours(self) -> bool:
        """True if nothing else has canceled the task meanwhile. 3.10 does not count."""
        assert self._task is not None
        return sys.version_info < (3, 11) or self._task.uncancel() <= self._canceled_before


async def _result(work: Callable[[HeldLease], Awaitable[T]], held: HeldLease) -> T:
    return await work(held)


async def _ended(task: asyncio.Future[T]) -> None:
    """Waits for the task's end. It ends before a cancellation goes on."""
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait((task,))
        raise
