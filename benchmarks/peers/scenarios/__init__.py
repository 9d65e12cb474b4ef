"""Scenarios, each a function that plays one peer and returns its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.peers.scenarios import backlog, killed, lending, overload, tokens, window
from benchmarks.peers.setting import Figure, Peer


class Load(Enum):
    """Load of a scenario on the machine, which says which peers can be played at the same time."""

    LIGHT = "all at once"
    SOME = "heavy peers alone"
    HEAVY = "each peer alone"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: what is played, and how."""

    title: str
    play: Callable[[Peer, bool], Sequence[Figure]]
    load: Load = Load.SOME


SCENARIOS: Mapping[str, Scenario] = {
    "backlog": Scenario(backlog.TITLE, backlog.play),
    "lending": Scenario(lending.TITLE, lending.play, Load.LIGHT),
    "tokens": Scenario(tokens.TITLE, tokens.play, Load.HEAVY),
    "window": Scenario(window.TITLE, window.play, Load.LIGHT),
    "killed": Scenario(killed.TITLE, killed.play, Load.HEAVY),
    "overload": Scenario(overload.TITLE, overload.play),
}
"""In the order of the table. The cost of a request is measured in turns, by `cost.py`."""
