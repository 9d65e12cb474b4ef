"""Which tier each request of a trace has: its own field says it, or else a mix in exact proportions.

The ladder, most important first, is the policy's. Without a policy it is what is in use, in the order of the usual
names; other names keep the order in which `--mix` has them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import floor

from sidecar.policy.policy import Policy
from sidecar.replay.row import Row

USUAL_LADDER = ("critical", "high", "normal", "low", "batch")
EVEN_MIX = {"high": 1.0, "normal": 1.0, "batch": 1.0}
"""Where nobody says anything: three tiers, as in the published figures."""


class BadTier(ValueError):
    """A tier that is none. One line."""


def ladder(policy: Policy | None, mix: Mapping[str, float] | None, rows: Sequence[Row]) -> tuple[str, ...]:
    """The tiers, most important first. Raises BadTier for a mix with a tier that the policy does not have."""
    if policy is not None:
        names = tuple(tier.name for tier in policy.tiers)
        unknown = [name for name in mix or () if name not in names]
        if unknown:
            raise BadTier(f"--mix: {unknown[0]!r} is no tier of the policy, which has {', '.join(names)}")
        return names
    named = {row.priority for row in rows if isinstance(row.priority, str)}
    if any(isinstance(row.priority, float | int) for row in rows):
        named |= set(USUAL_LADDER)  # a number is mapped to the whole ladder
    if mix is None and any(row.priority is None for row in rows):
        mix = EVEN_MIX
    known = [name for name in USUAL_LADDER if name in named or name in (mix or ())]
    return (*known, *(name for name in mix or () if name not in USUAL_LADDER))


def assign(
    rows: Sequence[Row], tiers: Sequence[str], mix: Mapping[str, float] | None, rng: random.Random
) -> Sequence[str]:
    """The tier of every row. All turns of a conversation have that of its first. Raises BadTier.

    Conversations without a tier of their own are dealt out by the mix (by default evenly over `tiers`): their numbers
    are as near to it as whole numbers can be, and their order is by chance.
    """
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(_conversation(row), row)
    found = {key: _named(row, tiers) for key, row in first.items() if row.priority is not None}
    rest = [key for key in first if key not in found]
    dealt = _deal(len(rest), mix or dict.fromkeys(tiers, 1.0))
    rng.shuffle(dealt)
    found.update(zip(rest, dealt, strict=True))
    return [found[_conversation(row)] for row in rows]


def _conversation(row: Row) -> str:
    return f"line {row.line}" if row.session is None else f"session {row.session}"


def _named(row: Row, tiers: Sequence[str]) -> str:
    """A name, or a number from 0 to 1 with 1 the most important, mapped as the door does it."""
    said, last = row.priority, len(tiers) - 1
    if isinstance(said, str) and said in tiers:
        return said
    if isinstance(said, float | int) and 0 <= said <= 1:
        return tiers[last - floor(said * last + 0.5)]
    raise BadTier(
        f"line {row.line}: {said!r} is no tier; write one of {', '.join(tiers)}, or a number from 0 to 1, "
        "or give a --policy that has it"
    )


def _deal(count: int, mix: Mapping[str, float]) -> list[str]:
    """Largest remainder: whole parts first, what is left to those who lost most to rounding."""
    total = sum(mix.values())
    exact = {name: count * weight / total for name, weight in mix.items()}
    whole = {name: floor(part) for name, part in exact.items()}
    by_remainder = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in by_remainder[: count - sum(whole.values())]:
        whole[name] += 1
    return [name for name, number in whole.items() for _ in range(number)]
