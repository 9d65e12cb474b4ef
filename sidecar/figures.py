"""Declarations of figures: each is declared once, as the annotation of the field that has it.

Most are documents' (`gauge`, `counter`, `amounts`); those of requests are added up as requests come (`counted`).
A declaration has the metric's name, its help, its unit, and how the figures of several processes of one pool become
one. Metrics are read from the documents that pages show, and the help is the field's description in `/openapi.json`.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

REQUESTS, TOKENS, SECONDS = "{request}", "{token}", "s"


Counted = defaultdict[tuple[str, ...], int]
"""A count for every combination of the labels' values.

Read in any thread. It only grows, by `+= number`: two event loops may add to one count, so what is added is computed
before, and no call comes between reading and writing.
"""


class Over(Enum):
    """How the figures of several processes become one.

    SUM: each has a part of its own. MOST and LEAST: the largest or the smallest counts, where all report the same, too.
    """

    SUM = "sum"
    MOST = "most"
    LEAST = "least"


class Figure(NamedTuple):
    """One metric. `labels` leaves out those of the document, and the pool's.

    `per_unit` of the field are one of the unit. `values` are the texts that the field may have: the metric is 1 for the
    present one, and 0 for the others. `missing` is reported where the document that has the field is not there.
    """

    name: str
    help: str
    unit: str = ""
    over: Over = Over.MOST
    labels: tuple[str, ...] = ()
    is_counter: bool = False
    per_unit: int = 1
    values: tuple[str, ...] = ()
    missing: float | None = None


def gauge(name: str, help_: str, unit: str = "", over: Over = Over.MOST, **more: Any) -> msgspec.Meta:
    """The annotation of a field that is a gauge; `more` are fields of `Figure`."""
    return _meta(help_, {"": Figure(name, help_, unit, over, **more)})


def counter(name: str, help_: str, unit: str, over: Over = Over.SUM, **more: Any) -> msgspec.Meta:
    """The annotation of a field that only grows."""
    return _meta(help_, {"": Figure(name, help_, unit, over, is_counter=True, **more)})


def counted(name: str, help_: str, labels: tuple[str, ...] = (), unit: str = REQUESTS, *, per_unit: int = 1) -> Any:
    """A field of a dataclass that is added up as requests come: a number, or with labels `Counted`."""
    figure = Figure(name, help_, unit, Over.SUM, labels, is_counter=True, per_unit=per_unit)
    return field(default_factory=partial(defaultdict, int) if labels else int, metadata={"figure": figure})


def amounts(name: str, beyond_its_unit: str, over: Over = Over.MOST) -> msgspec.Meta:
    """The annotation of a field with tokens and requests: two gauges. `beyond_its_unit` is the help after that word."""
    tokens = Figure(f"{name}.tokens", f"Tokens {beyond_its_unit}", TOKENS, over)
    requests = Figure(f"{name}.requests", f"Requests {beyond_its_unit}", REQUESTS, over)
    return _meta(f"Tokens and requests {beyond_its_unit}", {"tokens": tokens, "requests": requests})


def _meta(description: str, figures: Mapping[str, Figure]) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra={"figures": figures})


class Reading(NamedTuple):
    """A figure, and the attributes that lead to it from a document."""

    figure: Figure
    path: tuple[str, ...]

    def value(self, document: object) -> Any:
        """Its value in a document; None where there is none."""
        for name in self.path:
            if document is None:
                return self.figure.missing
            document = getattr(document, name)
        return document

    def series(self, document: object) -> Iterator[tuple[float, Mapping[str, str]]]:
        """The numbers of a document, each with the labels that are the figure's own."""
        value, labels = self.value(document), self.figure.labels
        if isinstance(value, Mapping):
            for of, number in list(value.items()):  # another thread may count on
                yield self._in_unit(number), dict(zip(labels, (of,) if isinstance(of, str) else of, strict=True))
        elif isinstance(value, str):
            for text in self.figure.values or (value,):
                yield int(text == value), {labels[0]: text}
        elif value is not None:
            yield self._in_unit(value), {}

    def _in_unit(self, number: float) -> float:
        per_unit = self.figure.per_unit
        return number / per_unit if per_unit > 1 else +number


def readings(kind: type) -> Iterator[Reading]:
    """All figures of a kind of document, those of the documents in it included, or of a dataclass of counts."""
    if is_dataclass(kind):
        found = ((one.metadata.get("figure"), one.name) for one in fields(kind))
        yield from (Reading(figure, (name,)) for figure, name in found if figure is not None)
        return
    for name, hint in get_type_hints(kind, include_extras=True).items():
        figures = _find_declared(hint)
        for inner, figure in figures.items():
            yield Reading(figure, (name, inner) if inner else (name,))
        for nested in () if figures else _documents(hint):
            for figure, path in readings(nested):
                yield Reading(figure, (name, *path))


def _find_declared(hint: Any) -> Mapping[str, Figure]:
    if get_origin(hint) is not Annotated:
        return {}
    found: Mapping[str, Figure] = next(
        (meta.extra["figures"] for meta in hint.__metadata__ if isinstance(meta, msgspec.Meta) and meta.extra), {}
    )
    return found


def _documents(hint: Any) -> Iterator[type]:
    """The documents that a field may have one of."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct))
