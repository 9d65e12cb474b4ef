"""Plan of a replay: when each request of a trace is sent, its length, its tier, and how it asks for that tier."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from math import floor
from statistics import median
from typing import Any

import msgspec

from sidecar.apis import Api
from sidecar.engines import Engine, NoPriorityEngine
from sidecar.policy.model import Policy
from sidecar.tools.loadgen import Planned
from sidecar.tools.replay.prompts import Conversation, Writer
from sidecar.tools.replay.server import PATHS
from sidecar.tools.replay.trace import BLOCK_TOKENS, TraceRow

_APIS = {path: api for api, path in PATHS.items()}


def plan(rows: Sequence[TraceRow], tiers: Sequence[str], writer: Writer, asking: Asking) -> list[Planned]:
    """The requests of one run, in the order of `rows`; `label` is the tier, also where the request names none.

    Turns of one conversation follow each other: one with a time is sent then, but not before its predecessor's answer
    has ended; one without, its delay after that. The model's answer goes into the next turn, as in AIPerf.
    """
    last: dict[str, int] = {}
    conversations: dict[str, Conversation] = {}
    planned: list[Planned] = []
    for index, (row, tier) in enumerate(zip(rows, tiers, strict=True)):
        headers, members = asking.of(tier, _APIS[writer.path(row)])
        if row.deadline_s is not None:
            headers = {**headers, "x-admission-deadline": f"{round(row.deadline_s * 1000)}ms"}
        after = None if row.session is None else last.get(row.session)
        conversation = Conversation() if row.session is None else conversations.setdefault(row.session, Conversation())
        planned.append(
            Planned(
                at_s=row.at_s or 0.0,
                path=writer.path(row),
                headers=headers,
                body=b"",
                label=tier,
                after=after,
                delay_s=row.delay_s if row.at_s is None and after is not None else 0.0,
                write=_writing(row, writer, members, conversation),
            )
        )
        if row.session is not None:
            last[row.session] = index
    return planned


def _writing(
    row: TraceRow, writer: Writer, members: Mapping[str, Any], conversation: Conversation
) -> Callable[[str], bytes]:
    def write(answer: str) -> bytes:
        own = [] if row.payload is not None else writer.own(row)
        return writer.body(row, conversation.with_turn(row, own, answer), members)

    return write


QUANTIZED_FROM_S = 1.0
"""Timestamps that share few moments, this far apart, are rounded: the Mooncake traces are, to 3 s."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Changes applied to every request: times are divided by `speed`, lengths multiplied by `scale`, then capped."""

    speed: float = 1.0
    scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    @property
    def block_tokens(self) -> int:
        """How long a shared block is after scaling, so that as much of each prompt is shared as before."""
        return max(1, round(BLOCK_TOKENS * self.scale))

    def of(self, row: TraceRow) -> TraceRow:
        """The row, faster and shorter. It keeps at least one token of each kind."""
        return replace(
            row,
            at_s=None if row.at_s is None else row.at_s / self.speed,
            delay_s=row.delay_s / self.speed,
            input_tokens=_scale(row.input_tokens, self.scale, self.max_input_tokens),
            output_tokens=_scale(row.output_tokens, self.scale, self.max_output_tokens),
        )


def schedule(rows: Sequence[TraceRow], sizing: Sizing, jitter_s: float, rng: random.Random) -> Sequence[TraceRow]:
    """The rows to play, in the order of the file: times count from the first.

    `jitter_s` spreads times that were rounded down: each is moved later by less than that, by chance.
    """
    moved = [row if row.at_s is None else row.at(row.at_s + rng.uniform(0.0, jitter_s)) for row in rows]
    start_s = min((row.at_s for row in moved if row.at_s is not None), default=0.0)
    return [sizing.of(row if row.at_s is None else row.at(row.at_s - start_s)) for row in moved]


def rounding_s(rows: Sequence[TraceRow]) -> float:
    """How far apart the moments of a trace are that was rounded, 0 for one that was not."""
    moments = sorted({row.at_s for row in rows if row.at_s is not None})
    timed = sum(row.at_s is not None for row in rows)
    if len(moments) < 3 or timed < 2 * len(moments):
        return 0.0
    gap_s = median(later - earlier for earlier, later in pairwise(moments))
    return gap_s if gap_s >= QUANTIZED_FROM_S else 0.0


def _scale(tokens: int | None, scale: float, most: int | None) -> int | None:
    if tokens is None:
        return None
    scaled = max(1, round(tokens * scale))
    return scaled if most is None else min(scaled, most)


USUAL_LADDER = ("critical", "high", "normal", "low", "batch")
EVEN_MIX = {"high": 1.0, "normal": 1.0, "batch": 1.0}
"""The default: three tiers, as in the published figures."""


class BadTier(ValueError):
    """A tier that is none. One line."""


def ladder(policy: Policy | None, mix: Mapping[str, float] | None, rows: Sequence[TraceRow]) -> tuple[str, ...]:
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
    rows: Sequence[TraceRow], tiers: Sequence[str], mix: Mapping[str, float] | None, rng: random.Random
) -> Sequence[str]:
    """The tier of every row. All turns of a conversation have that of its first. Raises BadTier.

    Conversations without a tier of their own are dealt out by the mix (by default evenly over `tiers`): their numbers
    are as near to it as whole numbers can be, and their order is by chance.
    """
    first: dict[str, TraceRow] = {}
    for row in rows:
        first.setdefault(_conversation(row), row)
    found = {key: _find_tier(row, tiers) for key, row in first.items() if row.priority is not None}
    rest = [key for key in first if key not in found]
    dealt = _deal(len(rest), mix or dict.fromkeys(tiers, 1.0))
    rng.shuffle(dealt)
    found.update(zip(rest, dealt, strict=True))
    return [found[_conversation(row)] for row in rows]


def _conversation(row: TraceRow) -> str:
    return f"line {row.line}" if row.session is None else f"session {row.session}"


def _find_tier(row: TraceRow, tiers: Sequence[str]) -> str:
    """A name, or a number from 0 to 1 with 1 the most important, mapped as the middleware does it."""
    priority, last = row.priority, len(tiers) - 1
    if isinstance(priority, str) and priority in tiers:
        return priority
    if isinstance(priority, float | int) and 0 <= priority <= 1:
        return tiers[last - floor(priority * last + 0.5)]
    raise BadTier(
        f"line {row.line}: {priority!r} is no tier; write one of {', '.join(tiers)}, or a number from 0 to 1, "
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


TIER_HEADER = "x-priority"


class By(str, Enum):
    """How the server learns a request's tier."""

    PRIORITY = "priority"
    TIER = "tier"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Asking:
    """Tier settings of a run's requests. `header` is the sidecar's tier header; `keys` are the tiers' API keys.

    `api_key` is sent for a tier without one. With `is_control` no request asks for a tier, and all send `api_key`.
    """

    by: By
    tiers: Sequence[str]
    engine: type[Engine] = NoPriorityEngine
    header: str = TIER_HEADER
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    is_control: bool = False

    def of(self, tier: str, api: Api) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """The headers, and the members of the body, of a request of this tier."""
        key = self.api_key if self.is_control else self.keys.get(tier, self.api_key)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        if self.is_control or self.by is By.KEY:
            return headers, {}
        if self.by is By.TIER:
            return {**headers, self.header: tier}, {}
        dialect = self.engine()
        forward = dialect.forward(api, dialect.priority(self.tiers.index(tier), len(self.tiers)))
        own = {name.decode(): value.decode() for name, value in forward.headers}
        return {**headers, **own}, {} if forward.member is None else {"priority": msgspec.json.decode(forward.member)}
