"""The Lua script, called directly: one replica's side of the wire, with the test's own time."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import redis

from sidecar.policy.model import Policy
from sidecar.pools.base import Ask
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import Argument, Reply
from sidecar.pools.redis.script import folded
from sidecar.scheduling import Scheduler
from tests.pools.harness import Clock
from tests.pools.redis_harness import CLOCK_KEY, CLOCKED_GAIN_SOURCE, CLOCKED_SOURCE


@cache
def compiled(source: str) -> tuple[str, str]:
    """A script as a server gets it, and the name by which it calls it then."""
    script = folded(source)
    return script, hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def evaluate(client: Any, source: str, root: str, *arguments: Argument) -> Any:
    """The answer of a script, which a server gets once: it is longer than all that is said to it."""
    script, name = compiled(source)
    try:
        return client.evalsha(name, 1, root, *arguments)
    except redis.exceptions.NoScriptError:
        return client.eval(script, 1, root, *arguments)


class Scripted:
    """One replica that says exactly what it should. `client` is a synchronous one.

    `source` is the script, that of the policy's order where it is None.
    """

    source: str | None = None

    def __init__(self, client: Any, clock: Clock, policy: Policy, name: str = "replica-a") -> None:
        self.client = client
        self.clock = clock
        self.policy = policy
        self.name = name
        self.root = protocol.root_key(policy.pool, is_by_gain=policy.rules.is_by_gain)
        self.fence = 0
        self.listed = 0

    def answer(self, *arguments: Argument) -> Any:
        """The script's raw answer."""
        self.client.set(CLOCK_KEY, self.clock.us)
        source = self.source or (CLOCKED_GAIN_SOURCE if self.policy.rules.is_by_gain else CLOCKED_SOURCE)
        return evaluate(self.client, source, self.root, *arguments)

    def call(self, *operations: Argument, kind: bytes = protocol.CALL) -> Reply:
        """Operations, and what came of them."""
        answer = self.answer(kind, self.name, self.fence, self.listed, *operations)
        assert protocol.is_ok(answer), answer
        reply = protocol.read_reply(answer)
        self.listed = reply.listed
        return reply

    def sync(self, *statements: Argument, known: int = 0, installs: bool = True, unsaid: int = 0) -> Reply:
        """States what the replica has, under a new fence."""
        return self.stated(protocol.SYNC, known, int(installs), unsaid, *statements)

    def begin(self, *statements: Argument, known: int = 0) -> Reply:
        """States the first part of what it has; calls state the rest."""
        return self.stated(protocol.BEGIN, known, protocol.KEEPS, 0, *statements)

    def stated(self, kind: bytes, known: int, brings: int, unsaid: int, *statements: Argument) -> Reply:
        """A statement, or its first part, under a new fence."""
        answer = self.statement(kind, known, brings, unsaid, *statements)
        assert protocol.is_ok(answer), answer
        self.listed = 0
        return protocol.read_reply(answer)

    def statement(self, kind: bytes, known: int, brings: int, unsaid: int, *statements: Argument) -> Any:
        """The script's raw answer to one."""
        self.fence += 1
        return self.answer(kind, self.name, self.fence, known, self.rules_text(), brings, unsaid, *statements)

    def rules_text(self) -> str:
        """The rules, as it states them."""
        return protocol.rules_text(self.policy, self.policy.rules)

    def enter(self, ticket: int, ask: Ask) -> Reply:
        """Asks for a lease."""
        return self.call(*entering(ticket, ask))

    def finish_tags(self, level: int, virtual: float) -> dict[str, float]:
        """The finish tag of every tenant of a tier that is ahead of its virtual time."""
        found = {}
        for key in self.client.keys(f"{self.root}:*:f:{level}"):
            for tenant, text in self.client.hgetall(key).items():
                found[tenant.decode()] = float(text.split()[0])
        return {tenant: finish for tenant, finish in found.items() if finish > virtual}

    def keys(self) -> dict[str, list[str]]:
        """The pool's keys behind its root, by what they are for."""
        found = sorted(key.decode() for key in self.client.keys(f"{self.root}*"))
        kinds = {key: key[len(self.root) :].split(":")[2] for key in found if key != self.root}
        return {kind: [key for key, of in kinds.items() if of == kind] for kind in ("beats", *"rowsqglfvpc")}


def finish_tags(scheduler: Scheduler, level: int) -> dict[str, float]:
    """The same in the scheduler of one process."""
    queue = scheduler._tiers[level].queue
    return {tenant: lane.finish for tenant, lane in queue._lanes.items() if lane.finish > queue._virtual}


def entering(ticket: int, ask: Ask) -> tuple[Argument, ...]:
    """The operation by which a ticket enters."""
    return (
        *protocol.gain(ticket, ask),
        protocol.ENTER,
        ticket,
        ask.tier,
        ask.tenant,
        ask.weight,
        ask.tokens,
        ask.requests,
    )
