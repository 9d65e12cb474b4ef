"""Survey of a server before any request is sent: its engine, its capacity, its load, and a sidecar in front of it."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.engines import ENGINES, Engine
from sidecar.engines.base import Facts, Gauges
from sidecar.engines.discovery import Identity, identify
from sidecar.engines.pages import Pages, Unread


class CannotLook(Exception):
    """There is no server to examine, or not with these options. The message is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The pages that were read. `unread` has a line for each page that should have been there."""

    identity: Identity
    engine: type[Engine]
    facts: Facts
    gauges: Gauges
    unread: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The engine and its version, for people."""
        return f"{self.engine.name} {self.facts.version}" if self.facts.version else self.engine.name

    @property
    def others(self) -> int | None:
        """Requests of other clients that were there; None where no gauge says."""
        known = [count for count in (self.gauges.running, self.gauges.waiting) if count is not None]
        return sum(known) if known else None

    @property
    def beside(self) -> str:
        """The end of a sentence about what is to be sent, where other clients are there."""
        others = self.others
        return f"; {others} requests of other clients are there, which makes the figures worse" if others else ""

    def served_model(self, url: str, named: str | None) -> str:
        """The model to ask for: the one that the user names, or the first. Raises CannotLook where there is none."""
        model = self.identity.model if named is None else named
        if model is None:
            raise CannotLook(f"{url}/v1/models lists no model; name one with --model")
        return model


async def survey(pages: Pages, named: type[Engine] | None) -> Survey:
    """Reads the pages. `named` is the engine that the user names. Raises CannotLook."""
    try:
        identity = await identify(pages)
    except Unread as reason:
        raise CannotLook(str(reason)) from None
    engine = identity.engine if named is None else named
    if engine is None:
        *others, last = (name for name, known in ENGINES.items() if known.carriers)
        raise CannotLook(
            "no page there says which engine it is (asked /v1/models, /openapi.json, /server_info, /metrics); "
            f"name it with --engine {', '.join(others)} or {last}, and give a key "
            "(SIDECAR_API_KEY or --key-file) if its pages want one"
        )
    unread: list[str] = []
    facts, gauges = Facts(), Gauges()
    try:
        facts = await engine.facts(pages)
    except Unread as reason:
        unread.append(str(reason))
    try:
        gauges = await engine.gauges(pages)
    except Unread as reason:
        unread.append(str(reason))
    return Survey(identity, engine, facts, gauges, tuple(unread))
