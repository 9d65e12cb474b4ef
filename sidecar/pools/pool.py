"""What every pool is: where requests ask for a lease, wait for it if they must, and give it back exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from sidecar.errors import RemainingLimits
from sidecar.events import Obstacle
from sidecar.policy.model import Limits, Policy
from sidecar.policy.rules import PoolRules


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a request wants to hold until it is settled. `tier` is a level.

    `request` is the same when a client sends the same request again, and as good as never for another one; `attempt`
    is the client's own count of how often it has sent it before, None where it does not say.
    `limits` are its tenant's, None where nothing of it is counted; what is over them falls to the level `downgrade`,
    or is refused where that is None.
    """

    tier: int
    tenant: str
    weight: int
    tokens: int
    requests: int
    request: int = 0
    attempt: int | None = None
    limits: Limits | None = None
    downgrade: int | None = None


class Grant(msgspec.Struct, frozen=True, gc=False):
    """How a wait ended, in a lease or not. Times in microseconds; `level` is the aged level in whole levels.

    `at_us` is the moment of the decision and `overtaken_at_us` that of the first overtaking, None where nothing that
    came later went first; both are on the clock of `Pool.now_us`. `served_ahead` counts the tokens admitted meanwhile,
    by the tier's name; tiers with none are left out. `passed` has whom it overtook: see `events.Admitted`.
    """

    at_us: int
    queue_wait_us: int
    starvation_us: int
    overtaken_at_us: int | None
    served_ahead: Mapping[str, int]
    level: int
    passed: Mapping[str, str] = {}


class NotShared(Exception):
    """The other replicas cannot be told, or heard. The message is one line, without secrets."""


class Shared(NamedTuple):
    """What another replica told of itself, so many seconds ago by the store's clock."""

    age_s: float
    report: bytes


class Lease(Protocol):
    """One request in a pool: waiting, then held, then over. It ends once, by `settle` or by `leave`.

    `tier` is the level that it waits and is charged at: the one asked for, or a lower one where its tenant was over its
    limits. `allowance` is what was left of them when it came in, None for a tenant without.

    `on_preempt` is set by who holds it, as soon as it has the lease: it is called on the event loop, at most once a
    grant and never after the end, when a more important request is to have the room. The holder lets its engine go and
    then calls `requeue`; the room is not free before. A lease without `on_preempt` is never preempted.
    """

    grant: Grant | None
    on_preempt: Callable[[], None] | None

    @property
    def tier(self) -> int: ...

    @property
    def allowance(self) -> RemainingLimits | None: ...

    def wait(self) -> asyncio.Future[Grant]:
        """The grant, as soon as there is one. Cancel-safe: whoever stops waiting calls `leave`.

        Raises StoreUnavailable where the store was lost and nothing else can admit this request.
        """

    def settle(self, used_tokens: int | None = None) -> bool:
        """Gives the lease back. False, and nothing changes, where it is not held.

        Its tenant's allowance is charged for `used_tokens` instead of the estimate; None: the estimate stands.
        """

    def leave(self) -> asyncio.Future[Grant | None]:
        """Stops waiting, at once; the result says how the wait had gone, as soon as the pool has told.

        None, and nothing changes, where it does not wait.
        """

    def keep(self) -> None:
        """The first byte goes out: the lease is never preempted from now on. Nothing changes where it is not held."""

    def requeue(self) -> asyncio.Future[Grant]:
        """Gives the room back and waits again, by the original arrival; as `wait`, but `grant` is None until then.

        Only after `on_preempt`, once, where it was not kept or settled since; else it raises RuntimeError. The wait may
        end in RequestTooLarge, too: the pool may have shrunk.
        """

    def resize(self, tokens: int) -> bool:
        """Sets what the lease holds, at least 1 token. False, and nothing changes, where it is not held."""


class Pool(Protocol):
    """Where leases live."""

    def change_rules(self, rules: PoolRules) -> None:
        """The pool has another size, with the same tiers. Whoever waits for more than it could ever give is refused."""

    def change_policy(self, policy: Policy) -> None:
        """Another policy with the same tiers (see `policy.replacing`): its rules, queues and limits count at once.

        Whoever waits or runs keeps its place and what it holds; a pool that holds more than it has now admits nobody
        until that has drained. Otherwise as `change_rules`.
        """

    def hold_back(self, for_s: float) -> None:
        """Admits nobody for so many seconds while anything is held; 0 ends it."""

    def now_us(self) -> int:
        """The clock that grants refer to, in whole microseconds; monotonic."""

    async def open(self) -> None:
        """Gets ready. The server's start calls it; `enter` does where no start was seen."""

    async def close(self) -> None:
        """Gives back whatever is still held, and lets go of everything. The server's end calls it."""

    async def enter(self, ask: Ask) -> Lease:
        """Takes a request in, and returns when the pool has looked at it: its lease is held, or waits.

        Raises, in this order, RequestTooLarge where it could never be admitted, TenantLimit where its tenant is over
        its own limits and nothing lower is open to it, QueueFull where its tier's queue is full, and StoreUnavailable
        where the leases cannot be reached. Canceled, it leaves nothing behind.
        """

    def most_tokens(self, level: int) -> int:
        """The most tokens that one request of a tier may hold, in a pool of the present size."""

    def retry_after_s(self, tier: int) -> float:
        """Seconds after which a request of this tier may expect to get in, by how fast what waits is being admitted."""

    def state(self) -> Mapping[str, object]:
        """The pool as it stands, for people and dashboards: JSON types only."""

    def oldest(self) -> Sequence[Grant | None]:
        """How the oldest that waits in this process has waited so far, of every tier; None where nobody waits."""

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """Why a request that waits could not be admitted as it came, and a sentence that says so with figures."""

    def readiness(self) -> Sequence[str]:
        """Why this pool admits nobody at present; empty while it does."""

    def notices(self) -> Sequence[str]:
        """What whoever is on call should know although requests are being admitted."""

    async def share(self, report: bytes) -> Mapping[str, Shared]:
        """Leaves `report`, of at most 64 KiB, to the other replicas of this pool, and returns theirs by their names.

        Whoever said nothing for 10 seconds is left out. A pool of one process has no others. Raises NotShared where the
        store cannot be reached; whatever happens, no request is admitted later for it.
        """
