"""The size of a pool by its engine's own figures (`capacity: {from: engine}`).

The engine is read once a second (`engine_reader`). The pool's size is the policy's fraction of the engine's, and
follows its changes. A size that cannot be read any more is kept, with a warning. Before the first reading no request is
admitted.

While more requests wait inside the engine than the policy's `waiting`, it is capped at what it runs, and at least one:
inside the engine no tier has a reserve. The cap ends by itself when the engine is not read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sidecar.engines.pages import Pages
from sidecar.errors import CapacityUnknown
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.pools.base import Clock, monotonic_us
from sidecar.pools.engine_reader import HELD_BACK_S, READ_EVERY_S, EngineReader, Size, warn_of_unbounded


class EngineSize:
    """Of one pool, which `follow` sets. `clock` is the pool's; `read_every_s` is for tests."""

    def __init__(
        self, policy: Policy, pages: Pages, clock: Clock = monotonic_us, read_every_s: float = READ_EVERY_S
    ) -> None:
        assert policy.engine_capacity is not None
        self._policy, self._capacity = policy, policy.engine_capacity
        self.reader = EngineReader(
            policy.engine,
            self._capacity,
            pages,
            clock,
            resized=self._resized,
            was_read=self._cap_if_crowded,
            read_every_s=read_every_s,
        )
        self.is_known = False

    def follow(self, change_rules: Callable[[PoolRules], None], cap: Callable[[float, int], None]) -> None:
        """Sets the functions that change the pool's size, and the `cap_engine` of its engine."""
        self._change_rules, self._cap = change_rules, cap

    async def open(self) -> None:
        """Reads the engine from now on. Returns when it was read, or could not be. Harmless when repeated."""
        if not self.reader.is_following():
            await self.reader.open()

    async def require(self) -> None:
        """Raises CapacityUnknown before the first reading. Where no server's start was seen, it is made now."""
        await self.open()
        if not self.is_known:
            trouble = f"the engine has not reported its capacity yet ({self.reader.trouble}); try again"
            raise CapacityUnknown(trouble, retry_after_s=1)

    def sized(self, policy: Policy) -> Policy:
        """Another policy, with what the engine last reported by its fraction and figures."""
        assert policy.engine_capacity is not None
        self._policy, self._capacity = policy, policy.engine_capacity
        self.reader.change_capacity(self._capacity)
        size = self.reader.size
        return policy if size is None else replace(policy, rules=policy.rules_for(*size))

    @property
    def is_held_back(self) -> bool:
        """True if too many requests wait inside the engine."""
        return self.reader.is_held_back

    def state(self) -> Mapping[str, object]:
        """The engine's latest figures: JSON types only."""
        reader, gauges = self.reader, self.reader.gauges
        return {
            "kv_tokens": gauges.kv_tokens,
            "max_running": gauges.max_running,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "preemptions": gauges.preemptions,
            "read_s_ago": None if reader.age_s is None else round(reader.age_s, 3),
            "trouble": reader.trouble,
            "held_back": reader.is_held_back,
        }

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        return () if self.is_known else (f"the engine has not reported its capacity yet: {self.reader.trouble}",)

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        found, reader = list[str](), self.reader
        if reader.notice is not None:
            found.append(reader.notice)
        if reader.is_held_back:
            found.append(f"{reader.gauges.waiting} requests wait inside the engine, more than {self._capacity.waiting}")
        return found

    async def _resized(self, before: Size | None) -> None:
        size = self.reader.size
        assert size is not None
        self.is_known = True
        self._change_rules(self._policy.rules_for(*size))
        if before is None:
            warn_of_unbounded(self._policy.engine, size)

    def _cap_if_crowded(self) -> None:
        """Not while the policy observes: the engine then gets every request, and its queue is not what enforcing
        leaves.
        """
        reader = self.reader
        reader.is_held_back = reader.is_crowded and self._policy.mode is not Mode.OBSERVE
        if reader.is_held_back:
            self._cap(HELD_BACK_S, 0)
