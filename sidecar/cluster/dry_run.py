"""Dry-run report of one process: what enforcing the policy would have done. `/observed` and `sidecar observed` show it.

Those of several replicas are added up by Prometheus, from `admission.observed` and its histograms.

JSON names are the field names. Times that end in `_s` are seconds; those called `at_s`, `since_s` and `until_s` are
seconds since 1970. Quantiles cover the requests that would have been admitted, with those that would not have waited,
and those that would still wait, with their waits so far. They are right to 5%. The longest times are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from sidecar.cluster.doubts import Doubt, doubts
from sidecar.durations import short_duration
from sidecar.events import ShadowHolds
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.pools.guards import GuardFigures
from sidecar.telemetry.dry_run import DryRunCounts, DryRunReport, added_up


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
    return " ".join([_refused(total, by_tier), _waited(total, by_tier), *_not_known(total)])


def _refused(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts]) -> str:
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


def _waited(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts]) -> str:
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
