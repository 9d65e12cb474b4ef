"""The counts that counters report, by their labels."""

from __future__ import annotations

from typing import TypeVar

Labels = TypeVar("Labels", bound=tuple[str, ...])


class Count:
    """One series of a counter, found by its labels once and read in any thread. It only grows, by `+= number`.

    Two event loops may add to one: what is added is computed before, so that no call comes between reading and writing.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def count_of(counted: dict[Labels, Count], labels: Labels) -> Count:
    """The count of these labels; from now on there is one."""
    return counted.get(labels) or counted.setdefault(labels, Count())


def add(counted: dict[Labels, Count], labels: Labels, number: int = 1) -> None:
    """Adds to the count of these labels."""
    count_of(counted, labels).number += number
