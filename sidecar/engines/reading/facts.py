"""What an engine says of itself. None stands for what it does not say."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.policy.model import EngineName


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What changes: `kv_tokens` and `max_running` are what it holds at once, `running` and `waiting` are its requests.

    All of one engine: the sum of its data-parallel ranks. `waiting` counts what is queued inside the engine.
    `unfinished` is the most requests that it may have now; None where its figures may stand still, or leave some out.
    """

    kv_tokens: int | None = None
    max_running: int | None = None
    running: int | None = None
    waiting: int | None = None
    unfinished: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What stays as long as the engine runs.

    `by_priority` is whether its queue is ordered by priority, `is_inverted` whether a switch turned the direction of
    its numbers round, `has_field` whether its schema has the priority field of chat completions, `default_priority`
    what an untagged request counts as. `preempts_beyond` is the difference of two priorities above which the more
    important request throws out a running one, None where none does or the engine does not say. `where` names, for each
    fact that was found, the page or setting that said so.
    """

    engine: EngineName
    version: str | None = None
    by_priority: bool | None = None
    is_inverted: bool | None = None
    has_field: bool | None = None
    default_priority: int | None = None
    preempts_beyond: int | None = None
    where: tuple[tuple[str, str], ...] = ()

    def source(self, name: str) -> str | None:
        """Where a fact was found."""
        return dict(self.where).get(name)
