"""A tenant's limits at the door: what its clients read of them, and what a request is charged in the end.

The headers are OpenAI's: the limit by the minute, what may come at once now, and the time until all of it may again, as
Go writes durations (`6m0s`, `1.5s`, `100ms`). Its clients, and the proxies in front of them, go by these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sidecar.asgi.understanding import Understood
from sidecar.asgi.usage import UsageReader
from sidecar.classify import Classification
from sidecar.errors import AdmissionError, QueueFull, RemainingLimit, RemainingLimits, TenantLimit
from sidecar.pools import Lease, Pool

Headers = Iterable[tuple[bytes, bytes]]


async def entered(pool: Pool, understood: Understood) -> Lease:
    """Takes a request into the pool, and notes at which tier. Raises what `Pool.enter` does."""
    if understood.payload.unsized is not None:
        understood.hold_at_least(pool.most_tokens(understood.classification.level))
    try:
        lease = await pool.enter(understood.ask())
    except QueueFull as full:
        note_tier(understood.classification, full.level)
        raise
    note_tier(understood.classification, lease.tier)
    return lease


def note_tier(classification: Classification, level: int | None) -> None:
    """Takes over the tier at which the pool took a request in, or had no place for it: it rules from then on."""
    if level is not None and level != classification.level:
        classification.downgraded_from = classification.level
        classification.level = level


def limits_headers(understood: Understood, lease: Lease, tier_names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """What the answer to a request that was let in says of its tenant's limits."""
    downgraded_from = understood.classification.downgraded_from
    if downgraded_from is not None:
        yield b"x-admission-downgraded-from", tier_names[downgraded_from]
    if understood.output_cap is not None:
        yield b"x-admission-max-output-tokens", b"%d" % understood.output_cap
    yield from allowance_headers(lease.allowance)


def allowance_headers(allowance: RemainingLimits | None) -> Iterator[tuple[bytes, bytes]]:
    """What an answer says of its tenant's limits; nothing for a tenant without."""
    if allowance is not None:
        yield from _of(b"requests", allowance.requests)
        yield from _of(b"tokens", allowance.tokens)


def refusal_headers(error: AdmissionError) -> Headers:
    """The same for a request that was refused over them."""
    return allowance_headers(error.allowance) if isinstance(error, TenantLimit) else ()


def _of(name: bytes, remaining: RemainingLimit | None) -> Iterator[tuple[bytes, bytes]]:
    if remaining is not None:
        yield b"x-ratelimit-limit-" + name, b"%d" % remaining.per_minute
        yield b"x-ratelimit-remaining-" + name, b"%d" % remaining.left
        yield b"x-ratelimit-reset-" + name, duration(remaining.reset_us)


def duration(us: int) -> bytes:
    """A time as Go writes it, in whole milliseconds, rounded up: whoever waits for so long never comes too early."""
    ms = -(-us // 1000)
    if 0 < ms < 1000:
        return b"%dms" % ms
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = (b"%g" % (ms / 1000)) + b"s"
    if hours:
        return b"%dh%dm" % (hours, minutes) + seconds
    return b"%dm" % minutes + seconds if minutes else seconds


def used_tokens(usage: UsageReader, prompt_tokens: int, status: int | None) -> tuple[int, bool]:
    """Tokens that a request used, and whether anything says so: the engine, a stream's chunks, or its failure."""
    is_counted = usage.input_tokens is not None or usage.output_tokens is not None or usage.chunks > 0
    return usage.used_tokens(prompt_tokens), is_counted or (status is not None and status >= 400)
