"""Documents of the leases whose sizes are learned: for pages, metrics and `/state`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sidecar.figures import TOKENS, Over, counter, gauge
from sidecar.lengths.estimator import LearnedLengths


class EngineSizesDocument(msgspec.Struct, frozen=True):
    """The leases of one process at one engine, for people and metrics. `engine` is None where the pool has one engine.

    `quantile`, `overlap` and `reason` are what is in force. Its `running` leases hold `held_tokens` in the pool. They
    are expected to use `expected_tokens`, as a plain sum, and use `used_tokens` now, as far as that is known: the
    output of an answer that does not stream is not. `growths` counts how often one of its leases grew. `preemptions`
    counts the engine's own since the first reading, None where it does not say.
    """

    engine: str | None
    quantile: Annotated[
        float,
        gauge("admission.lease.quantile", "Part of answers that are no longer than what a lease holds for them."),
    ]
    overlap: Annotated[
        float, gauge("admission.lease.overlap", "Part of what requests need that is counted, as they end apart.")
    ]
    reason: str
    is_raised: Annotated[
        bool,
        gauge(
            "admission.lease.quantile_raised",
            "1 while the engine's preemptions keep the quantile above that of the policy's `learn`, else 0.",
        ),
    ]
    running: int
    held_tokens: Annotated[
        int,
        gauge("admission.lease.held.tokens", "Tokens that the running leases of this process hold.", TOKENS, Over.SUM),
    ]
    expected_tokens: Annotated[
        int,
        gauge(
            "admission.lease.expected.tokens",
            "Tokens that the requests of these leases are expected to use.",
            TOKENS,
            Over.SUM,
        ),
    ]
    used_tokens: Annotated[
        int,
        gauge(
            "admission.lease.used.tokens",
            "Tokens that these leases use now.",
            TOKENS,
            Over.SUM,
        ),
    ]
    growths: int = 0
    preemptions: Annotated[
        int | None,
        counter(
            "admission.engine.preemptions",
            "The engine's preemptions for lack of KV cache, since this process first read them.",
            "{preemption}",
            Over.MOST,
        ),
    ] = None


class LeaseSizesDocument(msgspec.Struct, frozen=True):
    """The leases of one process at all engines, and what was learned most often: the admin port's `/state` has it."""

    learn: str
    engines: list[EngineSizesDocument] = []
    learned: list[LearnedLengths] = []
