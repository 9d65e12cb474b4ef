"""Dry-run report of all replicas: what enforcing the policy would have done. `/observed` and `sidecar observed` show
it.

JSON names are the field names. Times that end in `_s` are seconds; those called `at_s` and `since_s` are seconds since
1970. Quantiles cover the requests that would have been admitted, with those that would not have waited, and are right
to 5%. The longest times are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sidecar.cluster.merge import ReceivedReport
from sidecar.durations import short_duration
from sidecar.policy.model import Mode, Policy
from sidecar.telemetry.dry_run import DryRunCounts, added_up


class ObservedRow(msgspec.Struct, frozen=True):
    """Some requests, and what would have become of them. `name` is empty where it was not known yet.

    Of those that would have been admitted, `waited` would have waited for 10 ms or more. `refused` and `unknown` are by
    code. `abandoned` are those whose client left before they would have been admitted. Of all, `starved` would have
    been overtaken for 10 ms or more, and `served_ahead` has the tokens that would have gone first, by tier.
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


class ObservedReport(msgspec.Struct, frozen=True):
    """All rows, by one policy. `since_s` is None where nothing was observed by it.

    `replicas` are counted in; `left_out` are those that observe by another policy. `undecided` are the requests that
    would still be waiting. `conclusion` says it in words.
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


def observed_report(policy: Policy, all_heard: Sequence[ReceivedReport], at_s: float) -> ObservedReport:
    """The report by this policy, at `at_s`."""
    counted = [one for one in all_heard if _generation(one) == policy.generation]
    standing = [one.report.observed for one in counted if one.report.observed is not None]
    since_s = min((one.report.observed.since_s - one.ahead_s for one in counted if one.report.observed), default=None)
    by_tier = _by_name(told.by_tier for told in standing)
    by_tenant = _by_name(told.by_tenant for told in standing)
    total = added_up(by_tier.values())
    undecided = sum(one.report.waiting for one in counted)
    ranks = {tier.name: tier.level for tier in policy.tiers}
    tiers = sorted(by_tier, key=lambda name: ranks.get(name, len(ranks)))
    tenants = sorted(by_tenant, key=lambda name: (-by_tenant[name].requests, name))
    return ObservedReport(
        mode=policy.mode.value,
        generation=policy.generation,
        at_s=round(at_s, 3),
        since_s=None if since_s is None else round(since_s, 3),
        replicas=sorted(one.report.replica for one in counted),
        left_out=sorted(one.report.replica for one in all_heard if _generation(one) not in (policy.generation, None)),
        undecided=undecided,
        conclusion=conclusion(policy.mode, total, by_tier, undecided),
        total=_row("", total),
        tiers=[_row(name, by_tier[name]) for name in tiers],
        tenants=[_row(name, by_tenant[name]) for name in tenants],
    )


def _generation(one: ReceivedReport) -> str | None:
    return None if one.report.observed is None else one.report.observed.generation


def _by_name(all_told: Iterable[dict[str, DryRunCounts]]) -> dict[str, DryRunCounts]:
    summed: dict[str, DryRunCounts] = {}
    for told in all_told:
        for name, tally in told.items():
            summed.setdefault(name, DryRunCounts()).add(tally)
    return summed


def _row(name: str, tally: DryRunCounts) -> ObservedRow:
    return ObservedRow(
        name=name,
        requests=tally.requests,
        admitted=tally.admitted,
        waited=tally.waited,
        wait_p50_s=tally.wait_us(0.5) / 1e6,
        wait_p99_s=tally.wait_us(0.99) / 1e6,
        wait_max_s=tally.wait_max_us / 1e6,
        starved=tally.starved,
        starvation_max_s=tally.starvation_max_us / 1e6,
        refused=_most_first(tally.refused),
        abandoned=tally.abandoned,
        unknown=_most_first(tally.unknown),
        served_ahead=_most_first(tally.served_ahead),
    )


def _most_first(counted: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))


_MOST_NAMED = 3


def conclusion(mode: Mode, total: DryRunCounts, by_tier: Mapping[str, DryRunCounts], undecided: int) -> str:
    """The effect of enforcing, in sentences; `undecided` requests would still be waiting."""
    if mode is not Mode.OBSERVE:
        return "Nothing is observed: this policy is enforced. Write `mode: observe` into it to see what it would do."
    if not total.requests:
        return "No request has been observed yet by this policy."
    return " ".join([_refused(total, by_tier), _waited(total, by_tier), *_not_known(total, undecided)])


def _refused(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts]) -> str:
    refused = sum(total.refused.values())
    sentence = f"Enforcing would have refused {_of_all(refused, total.requests)}"
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


def _not_known(total: DryRunCounts, undecided: int) -> list[str]:
    unknown = sum(total.unknown.values())
    said = [f"Of {unknown:,} it is not known ({', '.join(total.unknown)})."] if unknown else []
    return [*said, f"{undecided:,} more would still be waiting."] if undecided else said


def _of_all(number: int, requests: int) -> str:
    noun = "request" if requests == 1 else "requests"
    return f"{number or 'none'} of {requests:,} {noun}" + (f" ({_share(number, requests)})" if number else "")


def _share(number: int, requests: int) -> str:
    percent = 100 * number / requests
    return "under 0.1%" if percent < 0.05 else f"{percent:.1f}%" if percent < 9.95 else f"{percent:.0f}%"
