"""Keys of a policy that a simulation uses, and why two policies may have the same figures in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sidecar.tools.simulate.figures import RunResult

_OF_A_PART = ("capacity.learn", "engines.affinity", "engines.capacity", "engines.prefill")
USED = frozenset(("aging", "fair", "max_preemptions", "order", "tiers", *_OF_A_PART))
"""What the pool, the scheduler, the placement and the learned lengths of a run read. Of `engines.capacity` that is
`learn` alone, and nothing else of it makes a difference: the pool is as large as the engines of the run."""
_PARTS = frozenset(("capacity", "engines"))
_Path = tuple[str, ...]


def unused_keys(data: Mapping[str, Any]) -> list[str]:
    """The keys of a policy's file that no run uses, in their order."""
    return [name for name in dict.fromkeys(_name(path) for path, _ in _leaves(data)) if name not in USED]


def why_alike(one: Mapping[str, Any], other: Mapping[str, Any], runs: Sequence[RunResult]) -> str:
    """Why two policies have the same figures in all of these runs, which are those of one of them."""
    first, second = dict(_leaves(one)), dict(_leaves(other))
    differing = [path for path in dict.fromkeys((*first, *second)) if first.get(path) != second.get(path)]
    if not differing:
        return "their files say the same"
    used = [".".join(path) for path in differing if _name(path) in USED]
    if not used:
        names = dict.fromkeys(_name(path) for path in differing)
        return f"they differ in {', '.join(names)} alone, which no run uses"
    if not any(tier.queue_wait_s.max for run in runs for tier in run.tiers.values()):
        return "no request had to wait, so nothing decides who is first; try a higher --scale"
    return f"no request met what they differ in: {', '.join(used)}"


def _name(path: _Path) -> str:
    """The key at the top of the file, or the one in it where some of its keys are used and some not."""
    if path[2:3] == ("hours",):  # a run has no hour of the day
        return "hours"
    return ".".join(path[:2] if path[0] in _PARTS else path[:1])


def _leaves(value: object, path: _Path = ()) -> Iterator[tuple[_Path, object]]:
    """Every value of a file that holds no other, by its path."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value
