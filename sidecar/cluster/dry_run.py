"""Dry-run report of one process: what enforcing the policy would have done. `/observed` and `sidecar observed` show it.

Those of several replicas are added up by Prometheus, from `admission.observed` and its histograms.

JSON names are the field names. Times that end in `_s` are seconds; those called `at_s`, `since_s` and `until_s` are
seconds since 1970. Quantiles cover the requests that would have been admitted, with those that would not have waited,
and those that would still wait, with their waits so far. They are right to 5%. The longest times are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from sidecar.durations import short_duration
from sidecar.events import ShadowHolds
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.pools.guards import GuardFigures
from sidecar.telemetry.dry_run import DryRunCounts, DryRunReport, added_up

# -- Doubts about a dry run: why its figures are not to be trusted at this load, and what to do.
#
# Each doubt stands for a premise of `sidecar.admission.dry_run` that does not hold. A doubt of one tier may be one
# of all: requests of one tier take the room of the others. So only what concerns the wishes of a tier's own clients
# is the tier's alone.

FEWEST = 5
"""Fewer requests than this say nothing of a figure's error."""
MOST_SHARE = 0.05
"""The part of the requests whose times may be wrong: more may move a 99th percentile or a number of refusals."""
MOST_GUESSED, MOST_APART = 0.1, 0.25
"""Drawn lengths are right on average where their sum is within a quarter, and rare ones do not matter."""
FEWEST_ARRIVALS, MOST_BY_CHANCE = 30, 0.6
"""See `sidecar.admission.dry_run.engine_times`: 26% follow by chance, and 18 of 30 in one case of 20,000."""
FEW_IN_TAIL, TAIL_FROM_S, TAIL_TIMES = 100, 0.5, 1.5
"""Of so few, one request alone makes a 99th percentile: it is doubted where it is this far beyond the 90th."""
_OWN_FAULT = frozenset(("too_many_shadows", "defect"))


class Doubt(msgspec.Struct, frozen=True):
    """One reason, in a sentence, and what to do. `tier` is empty where it concerns all."""

    tier: str
    reason: str
    advice: str


def doubts(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts], holds: Mapping[str, ShadowHolds]) -> list[Doubt]:
    """All doubts about these figures. `total` is the sum of `by_tier`."""
    if not holds and not total.unknown:
        return []
    summed = _add_up(holds.values())
    of_all = [*_engine_doubts(summed), *_client_doubts(summed), *_unknown_doubts(total)]
    return [*of_all, *_tier_doubts(holds), *_tail_doubts(by_tier)]


def _add_up(all_holds: Iterable[ShadowHolds]) -> ShadowHolds:
    """The sum of all."""
    summed = ShadowHolds()
    for holds in all_holds:
        for name in ShadowHolds.__struct_fields__:
            setattr(summed, name, getattr(summed, name) + getattr(holds, name))
    return summed


def _engine_doubts(holds: ShadowHolds) -> Iterator[Doubt]:
    if _is_much(holds.unlearned, holds.shadows):
        yield Doubt(
            "",
            f"{holds.unlearned:,} of {holds.shadows:,} requests came while the engine ran more than the pool admits, "
            "and before it was known how long it takes when it runs less.",
            "Let it observe quieter traffic first; a later period of the same process knows it.",
        )
    if _is_much(holds.lost, holds.shadows):
        yield Doubt(
            "",
            f"The engine refused or failed {holds.lost:,} of {holds.shadows:,} requests itself; how long they would "
            "have run is a guess.",
            "Find out why (its own queue limit, a restart), or observe at a time without it.",
        )
    is_used = holds.guessed >= FEWEST and holds.guessed > MOST_GUESSED * holds.shadows
    if is_used and not _agrees(holds):
        yield Doubt(
            "",
            f"{holds.guessed:,} of {holds.shadows:,} requests would have ended before they did, and their output "
            "lengths could not be guessed from earlier ones.",
            "Let it observe longer; clients that set `max_tokens` make lengths easier to know.",
        )


def _agrees(holds: ShadowHolds) -> bool:
    """True if the drawn times are right on average, as far as they are known since."""
    is_known = holds.guessed_and_known >= max(FEWEST, holds.guessed // 4)
    return is_known and abs(holds.guessed_s - holds.known_s) <= MOST_APART * holds.known_s


def _client_doubts(holds: ShadowHolds) -> Iterator[Doubt]:
    if _is_much(holds.left, holds.shadows):
        yield Doubt(
            "",
            f"{holds.left:,} of {holds.shadows:,} clients disconnected because the engine was slow, and would have "
            "been served; how long their requests would have run is a guess.",
            "Observe at a time when clients do not give up, or lower the load on the engine.",
        )


def _unknown_doubts(total: DryRunCounts) -> Iterator[Doubt]:
    dropped = sum(number for code, number in total.unknown.items() if code in _OWN_FAULT)
    if dropped and dropped > 0.01 * total.requests:
        yield Doubt(
            "",
            f"{dropped:,} of {total.requests:,} requests were not followed (too many at once, or a defect).",
            "Enforce with more capacity first, or observe with more replicas; the log has the defect, if it is one.",
        )


def _tier_doubts(holds: Mapping[str, ShadowHolds]) -> Iterator[Doubt]:
    for tier, one in holds.items():
        if one.arrivals >= FEWEST_ARRIVALS and one.followed > MOST_BY_CHANCE * one.arrivals:
            share = round(100 * one.followed / one.arrivals)
            yield Doubt(
                tier,
                f"Clients of {tier} seem to send their next request when the last one was answered ({share}% of "
                f"{one.arrivals:,} came directly after an end): when enforcing they would send at another pace.",
                "Take the figures of this tier as a direction, and enforce for a trial hour.",
            )


def _tail_doubts(by_tier: Mapping[str, DryRunCounts]) -> Iterator[Doubt]:
    for tier, counts in by_tier.items():
        p90_s, p99_s = counts.wait_us(0.9) / 1e6, counts.wait_us(0.99) / 1e6
        if tier and counts.admitted <= FEW_IN_TAIL and p99_s > max(p90_s + TAIL_FROM_S, p90_s * TAIL_TIMES):
            yield Doubt(
                tier,
                f"The P99 of {tier} is one request's: of {counts.admitted:,}, nine in ten would have waited for at "
                f"most {short_duration(p90_s)}, and the longest for {short_duration(p99_s)}.",
                "Let it observe longer: which single request waits longest is chance.",
            )


def _is_much(number: int, of: int) -> bool:
    return number >= FEWEST and number > MOST_SHARE * of


class ObservedRow(msgspec.Struct, frozen=True):
    """Some requests, and what would have become of them. `name` is empty where it was not known yet.

    Of those that would have been admitted, `waited` would have waited for 10 ms or more. `refused` and `unknown` are by
    code. `abandoned` are those whose client left before they would have been admitted. Of all, `starved` would have
    been overtaken for 10 ms or more, `served_ahead` has the tokens that would have gone first, by tier, and `clamped`
    how many asked for a better tier than they may have, by the tier that they asked for. `waiting`
    would still be waiting. A wait that may grow because of them is the least that it can be (`*_is_least`).
    `is_trusted` is false where a doubt of the report concerns the row.
    """

    name: str
    requests: int
    admitted: int
    waited: int
    wait_p50_s: float
    wait_p99_s: float
    wait_max_s: float
    starved: int
    starvation_max_s: float
    refused: dict[str, int]
    abandoned: int
    unknown: dict[str, int]
    served_ahead: dict[str, int]
    clamped: dict[str, int] = {}
    waiting: int = 0
    wait_p50_is_least: bool = False
    wait_p99_is_least: bool = False
    wait_max_is_least: bool = False
    is_trusted: bool = True


class ObservedSlo(msgspec.Struct, frozen=True):
    """A tier that would be held to its SLO. `met` and `missed` are its streams as they passed.

    `would_meet` and `would_miss` are estimates of what they would have done when enforcing: first tokens as the engine
    is known to give them, and paces as it is known to have among so many. Of answers that do not stream nothing is
    said. Less important requests would fill the pool to `share` of it now, None once observing is over. `is_trusted` is
    false where a doubt of the report concerns it.
    """

    tier: str
    hold: float
    met: int
    missed: int
    would_meet: int
    would_miss: int
    share: float | None
    is_trusted: bool


class ObservedReport(msgspec.Struct, frozen=True):
    """All rows of one process, by one policy. `since_s` is None where nothing was observed; `until_s` while observing
    goes on.

    `replicas` has the process that was counted; `left_out` are the other replicas of the pool that observe, too.
    `undecided` are the requests that would still be waiting. `conclusion` says it in words, and `doubts` say why it is
    not to be trusted at this load. `slo` has the tiers with `hold`.
    """

    mode: str
    generation: str
    at_s: float
    since_s: float | None
    replicas: list[str]
    left_out: list[str]
    undecided: int
    conclusion: str
    total: ObservedRow
    tiers: list[ObservedRow]
    tenants: list[ObservedRow]
    until_s: float | None = None
    doubts: list[Doubt] = []
    slo: list[ObservedSlo] = []


def observed_report(  # noqa: PLR0917
    policy: Policy,
    period: DryRunReport | None,
    replica: str,
    others: Sequence[str],
    at_s: float,
    guards: Sequence[GuardFigures] = (),
) -> ObservedReport:
    """The report at `at_s` of a `replica` by this policy; once the policy is enforced, of the last `period`.

    `others` are the replicas that observe, too. `guards` are the guarded tiers of the pool, as they are now.
    """
    if period is not None and policy.mode is Mode.OBSERVE and period.generation != policy.generation:
        period = None
    by_tier, by_tenant = ({}, {}) if period is None else (period.by_tier, period.by_tenant)
    total = added_up(by_tier.values())
    found = [] if period is None else doubts(total, by_tier, period.holds)
    doubted = {doubt.tier for doubt in found}
    ranks = {tier.name: tier.level for tier in policy.tiers}
    tiers = sorted(by_tier, key=lambda name: ranks.get(name, len(ranks)))
    tenants = sorted(by_tenant, key=lambda name: (-by_tenant[name].requests, name))
    return ObservedReport(
        mode=policy.mode.value,
        generation=policy.generation if period is None else period.generation,
        at_s=round(at_s, 3),
        since_s=None if period is None else round(period.since_s, 3),
        replicas=[] if period is None else [replica],
        left_out=sorted(others),
        undecided=total.waiting,
        conclusion=conclusion(policy.mode, total, by_tier),
        total=_row("", total, is_trusted=not found),
        tiers=[_row(name, by_tier[name], is_trusted=not doubted & {"", name}) for name in tiers],
        tenants=[_row(name, by_tenant[name], is_trusted=not found) for name in tenants],
        until_s=None if period is None or period.until_s is None else round(period.until_s, 3),
        doubts=found,
        slo=[] if period is None else _slo(policy, period, guards, doubted),
    )


def _slo(
    policy: Policy, period: DryRunReport, guards: Sequence[GuardFigures], doubted: Collection[str]
) -> list[ObservedSlo]:
    shares = {guard.tier: guard.share for guard in guards if period.until_s is None}
    return [
        ObservedSlo(
            tier=tier.name,
            hold=float(tier.hold),
            met=holds.met,
            missed=holds.missed,
            would_meet=holds.would_meet,
            would_miss=holds.would_miss,
            share=shares.get(tier.name),
            is_trusted=not {"", tier.name} & {*doubted},
        )
        for tier in policy.tiers
        if tier.hold and (holds := period.holds.get(tier.name, ShadowHolds()))
    ]


def _row(name: str, tally: DryRunCounts, *, is_trusted: bool) -> ObservedRow:
    p50, p99 = tally.wait(0.5), tally.wait(0.99)
    return ObservedRow(
        name=name,
        requests=tally.requests,
        admitted=tally.admitted,
        waited=tally.waited,
        wait_p50_s=p50.wait_us / 1e6,
        wait_p99_s=p99.wait_us / 1e6,
        wait_max_s=max(tally.wait_max_us, tally.waiting_max_us) / 1e6,
        starved=tally.starved,
        starvation_max_s=tally.starvation_max_us / 1e6,
        refused=_most_first(tally.refused),
        abandoned=tally.abandoned,
        unknown=_most_first(tally.unknown),
        served_ahead=_most_first(tally.served_ahead),
        clamped=_most_first(tally.clamped),
        waiting=tally.waiting,
        wait_p50_is_least=p50.is_least,
        wait_p99_is_least=p99.is_least,
        wait_max_is_least=tally.waiting > 0,
        is_trusted=is_trusted,
    )


def _most_first(counted: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))


_MOST_NAMED = 3


def conclusion(mode: Mode, total: DryRunCounts, by_tier: Mapping[str, DryRunCounts]) -> str:
    """The effect of enforcing, in sentences."""
    if not total.requests and not total.waiting:
        if mode is Mode.OBSERVE:
            return "No request has been observed yet by this policy."
        if mode is Mode.PASS:
            return "Nothing is observed: every request passes (mode: pass)."
        return "Nothing is observed: this policy is enforced. Write `mode: observe` into it to see what it would do."
    return " ".join([_describe_refused(total, by_tier), _describe_waits(total, by_tier), *_not_known(total)])


def _describe_refused(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts]) -> str:
    refused = sum(total.refused.values())
    sentence = f"Enforcing would have refused {_share_of_all(refused, total.requests)}"
    reasons = sorted(
        ((number, code, tier) for tier, tally in by_tier.items() for code, number in tally.refused.items()),
        key=lambda reason: (-reason[0], reason[1:]),
    )
    named = [f"{number:,} {f'of {tier} ' if tier else ''}by {code}" for number, code, tier in reasons[:_MOST_NAMED]]
    if len(reasons) > _MOST_NAMED:
        named.append(f"{sum(reason[0] for reason in reasons[_MOST_NAMED:]):,} for other reasons")
    return f"{sentence}: {', '.join(named)}." if named else f"{sentence}."


def _describe_waits(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts]) -> str:
    sentence = "No request would have waited and then been admitted"
    if total.waited:
        longest = max(by_tier, key=lambda name: by_tier[name].wait_max_us)
        most = f"{short_duration(total.wait_max_us / 1e6)} ({longest})"
        share = _share(total.waited, total.requests)
        sentence = f"{total.waited:,} ({share}) would have waited before they were admitted, the longest {most}"
    if not total.starved:
        return f"{sentence}; none would have starved."
    starved = max(by_tier, key=lambda name: by_tier[name].starvation_max_us)
    most = f"{short_duration(total.starvation_max_us / 1e6)} ({starved})"
    return f"{sentence}; {total.starved:,} would have starved, the longest {most}."


def _not_known(total: DryRunCounts) -> list[str]:
    unknown = sum(total.unknown.values())
    sentences = [f"Of {unknown:,} it is not known ({', '.join(total.unknown)})."] if unknown else []
    if not total.waiting:
        return sentences
    longest = short_duration(total.waiting_max_us / 1e6)
    return [*sentences, f"{total.waiting:,} more would still be waiting, the longest for {longest} so far."]


def _share_of_all(number: int, requests: int) -> str:
    noun = "request" if requests == 1 else "requests"
    return f"{number or 'none'} of {requests:,} {noun}" + (f" ({_share(number, requests)})" if number else "")


def _share(number: int, requests: int) -> str:
    percent = 100 * number / requests
    return "under 0.1%" if percent < 0.05 else f"{percent:.1f}%" if percent < 9.95 else f"{percent:.0f}%"
