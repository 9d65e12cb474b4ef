"""Survey of a server before any request is sent: its engine, its capacity, its load, and a sidecar in front of it."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.engines.reading import Facts, Gauges, Identity, Pages, Unread, identify, read_facts, read_gauges
from sidecar.policy.model import EngineName


class CannotLook(Exception):
    """There is no server to examine, or not with these options. The message is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The pages that were read. `unread` has a line for each page that should have been there."""

    identity: Identity
    engine: EngineName
    facts: Facts
    gauges: Gauges
    unread: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The engine and its version, for people."""
        return f"{self.engine.value} {self.facts.version}" if self.facts.version else self.engine.value

    @property
    def others(self) -> int | None:
        """Requests of other clients that were there; None where no gauge says."""
        known = [count for count in (self.gauges.running, self.gauges.waiting) if count is not None]
        return sum(known) if known else None


async def survey(pages: Pages, named: EngineName | None) -> Survey:
    """Reads the pages. `named` is the engine that the user names. Raises CannotLook."""
    try:
        identity = await identify(pages)
    except Unread as reason:
        raise CannotLook(str(reason)) from None
    engine = identity.engine if named is None else named
    if engine is None:
        raise CannotLook(
            "no page there says which engine it is (asked /v1/models, /openapi.json, /server_info, /metrics); "
            "name it with --engine vllm, tensorrt-llm, sglang or dynamo, and give --key if its pages want one"
        )
    unread: list[str] = []
    facts, gauges = Facts(engine=engine), Gauges()
    try:
        facts = await read_facts(engine, pages)
    except Unread as reason:
        unread.append(str(reason))
    try:
        gauges = await read_gauges(engine, pages)
    except Unread as reason:
        unread.append(str(reason))
    return Survey(identity, engine, facts, gauges, tuple(unread))
