"""The benchmark of learned leases before a real vLLM: its requests, and that its targets can be missed.

`tests/real/test_learned_lengths.py` has the same engine; here none is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from benchmarks.reservations_vllm import ALONE, TITLES, Figures, missed, table

pytestmark = pytest.mark.long

OFF = Figures(
    tokens_per_s=700.0,
    running=10.0,
    kv=0.3,
    ttft_p50_s=7.0,
    ttft_p99_s=9.0,
    requests=600,
    preemptions=0,
    preemptions_before=0,
    raised=0,
    quantile=None,
    prompt=141.0,
    lengths=50_000,
    failed=0,
)


def rows(**changed: Figures) -> Mapping[str, Sequence[Figures]]:
    """A run of two rounds that reaches every target, but for what is changed."""
    more = replace(OFF, tokens_per_s=1000.0, running=20.0)
    usual = {"off": OFF, "cautious": more, "full": more, ALONE: replace(more, preemptions=100)}
    return {way: [figures] * 2 for way, figures in (usual | changed).items()}


def test_a_target_that_is_missed_is_named() -> None:
    assert missed(rows()) == []
    assert len(table(rows()).splitlines()) == 1 + 3 * len(TITLES)
    for found, named in (
        (rows(full=replace(OFF, running=12.0)), "1.20 of the requests run"),
        (rows(cautious=replace(OFF, tokens_per_s=600.0, running=20.0)), "0.86 of the tokens a second"),
        (rows(cautious=replace(OFF, running=20.0, preemptions=1)), "1.7 preemptions for 1,000 requests"),
        (rows(off=replace(OFF, failed=3)), "3 requests failed"),
        (rows(**{ALONE: OFF}), "does not bind"),
    ):
        assert [one for one in missed(found) if named in one], named
