"""Keys of a policy that a simulation uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OF_A_PART = ("capacity.learn", "engines.affinity", "engines.capacity", "engines.prefill")
USED = frozenset(("aging", "fair", "max_preemptions", "order", "tiers", *_OF_A_PART))
"""What the pool, the scheduler, the placement and the learned lengths of a run read. Of `engines.capacity` that is
`learn` alone, and nothing else of it makes a difference: the pool is as large as the engines of the run."""
_PARTS = frozenset(("capacity", "engines"))
_Path = tuple[str, ...]


def unused_keys(data: Mapping[str, Any]) -> list[str]:
    """The keys of a policy's file that no run uses, in their order."""
    return [name for name in dict.fromkeys(map(_name, _leaves(data))) if name not in USED]


def _name(path: _Path) -> str:
    """The key at the top of the file, or the one in it where some of its keys are used and some not."""
    if path[2:3] == ("hours",):  # a run has no hour of the day
        return "hours"
    return ".".join(path[:2] if path[0] in _PARTS else path[:1])


def _leaves(value: object, path: _Path = ()) -> Iterator[_Path]:
    """The path of every value of a file that holds no other."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path
