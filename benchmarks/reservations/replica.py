"""The product's own parts in virtual time: the pool, the sizes of leases, the estimator and the trust.

A replica does for each request what `admission.turn` and `admission.request` do, in the same order: size
it and enter it, begin its lease's size at the grant, look at it while it streams, learn from its end and settle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

from benchmarks.reservations.traces import Asked
from sidecar.apis import Api
from sidecar.lengths.estimator import LengthEstimator
from sidecar.lengths.lease_size import Expected, LeaseSize, LeaseSizes
from sidecar.payload.decode import Payload, decode
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.base import Ask, Lease
from sidecar.tools.step_model.queue import Job

CHAT = "/v1/chat/completions"


class Running:
    """One request from its entry on. It is the answer that `LeaseSizes` reads: its events and its count."""

    __slots__ = (
        "asked", "chunks", "expected", "large_tokens", "later_chunks", "later_tokens", "lease", "output_tokens",
        "sequence", "size",
    )  # fmt: skip

    def __init__(self, asked: Asked, expected: Expected | None, lease: Lease) -> None:
        self.asked = asked
        self.expected = expected
        self.lease = lease
        self.sequence = Job(asked.prompt, asked.output)
        self.size: LeaseSize | None = None
        self.chunks = self.large_tokens = self.later_chunks = 0
        self.output_tokens: int | None = None
        self.later_tokens: int | None = None


class Replica:
    """One process before a pool, which it may share with others. `waiting` are its requests in the pool's queue."""

    def __init__(self, policy: Policy, pool: Pool) -> None:
        self.estimator = LengthEstimator()
        self.sizes = LeaseSizes(policy.learn, pool.now_us, self.estimator)
        self.waiting: list[Running] = []
        self._pool = pool
        self._assumed = policy.tiers[0].default_output_tokens

    async def enter(self, asked: Asked) -> None:
        """A request comes and waits in the pool's queue, or is admitted at once."""
        bound = asked.max_tokens
        assumed = self._assumed if bound is None else bound
        tokens = most = asked.prompt + assumed
        expected = None
        if self.sizes.learns:
            limit = self._pool.most_tokens(0)
            payload = payload_of(bound, asked.streams)
            expected = self.sizes.expect(asked.tenant, CHAT, payload, asked.prompt, most, assumed, bound, limit)
            if expected is not None:
                tokens = expected.tokens
        lease = await self._pool.enter(Ask(0, asked.tenant, 1, tokens, 1, most=most))
        self.waiting.append(Running(asked, expected, lease))

    def granted(self) -> Iterator[Running]:
        """The requests that were admitted since, in order of arrival."""
        if not any(one.lease.grant is not None for one in self.waiting):
            return
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            if one.lease.grant is None:
                self.waiting.append(one)
                continue
            if one.expected is not None:
                one.size = self.sizes.begin(one.expected, one.lease, one, streams=one.asked.streams)
            yield one

    def streamed(self, one: Running, generated: int) -> int | None:
        """So many events of its answer have passed. Returns the number at which to call again."""
        if one.size is None:
            return None
        one.chunks = generated
        if generated >= one.size.next_look:
            one.size.look()
        return one.size.next_look

    def ended(self, one: Running) -> None:
        """The answer is complete, and says its length."""
        one.chunks = one.output_tokens = one.asked.output
        if one.size is not None:
            one.size.ended()
        if one.expected is not None:
            self.sizes.learn(one.expected, one, is_complete=True)
        one.lease.settle(one.asked.prompt + one.asked.output)


@cache
def payload_of(max_tokens: int | None, streams: bool) -> Payload:
    """What the product reads from a chat request."""
    body: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "-"}], "stream": streams}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return decode(Api.CHAT, json.dumps(body).encode())
