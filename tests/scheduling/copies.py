"""Copies of whole schedulers."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, TypeVar

from sidecar.scheduling.ticket import Ticket

Copied = TypeVar("Copied")


def copy_of(scheduler: Copied) -> Copied:
    """The same scheduler once more: what happens to one does not change the other."""
    return deepcopy(scheduler)


def _copied(ticket: Ticket, memo: dict[int, Any]) -> Ticket:
    """A ticket names its neighbors, which name it: it must be known before they are copied."""
    made = memo[id(ticket)] = copy(ticket)
    for name in ticket.__struct_fields__:
        setattr(made, name, deepcopy(getattr(ticket, name), memo))
    return made


Ticket.__deepcopy__ = _copied  # type: ignore[attr-defined]
