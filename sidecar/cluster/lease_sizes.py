"""Lease sizes of all replicas: by engine what leases hold and use, and what is in force where it differs."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.cluster.document import LeaseSizesRow
from sidecar.lengths.lease_size import EngineSizesDocument


def lease_size_rows(replicas: Iterable[Iterable[EngineSizesDocument]]) -> list[LeaseSizesRow]:
    """A row for each engine, of what each replica says of its own leases there.

    Tokens and growths are added up, as each lease has one replica. The quantile is the highest, with its reason. The
    overlap is that of all tokens, by what each replica expects. The engine counts its preemptions for all replicas, so
    theirs is the largest count.
    """
    by_engine: dict[str | None, list[EngineSizesDocument]] = {}
    for sizes in (sizes for documents in replicas for sizes in documents):
        by_engine.setdefault(sizes.engine, []).append(sizes)
    return [_row(engine, by_engine[engine]) for engine in sorted(by_engine, key=lambda name: name or "")]


def _row(engine: str | None, found: list[EngineSizesDocument]) -> LeaseSizesRow:
    highest = max(found, key=lambda sizes: sizes.quantile)
    expected = sum(sizes.expected_tokens for sizes in found)
    counted = sum(sizes.overlap * sizes.expected_tokens for sizes in found)
    preemptions = [sizes.preemptions for sizes in found if sizes.preemptions is not None]
    return LeaseSizesRow(
        engine=engine,
        quantile=highest.quantile,
        overlap=round(counted / expected if expected else max(sizes.overlap for sizes in found), 4),
        reason=highest.reason,
        is_raised=highest.is_raised,
        running=sum(sizes.running for sizes in found),
        held_tokens=sum(sizes.held_tokens for sizes in found),
        expected_tokens=expected,
        used_tokens=sum(sizes.used_tokens for sizes in found),
        growths=sum(sizes.growths for sizes in found),
        preemptions=max(preemptions, default=None),
    )
