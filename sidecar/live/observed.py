"""What enforcing would have done, as one document of all replicas: what `/observed` and `sidecar observed` show.

JSON names are the fields'. Times that end in `_s` are seconds; those called `at_s` and `since_s` are seconds since
1970. Quantiles are of those that would have been admitted, those without a wait included, and right to 5%; the longest
are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sidecar.live.merging import Heard
from sidecar.live.observed_words import conclusion
from sidecar.policy.policy import Policy
from sidecar.telemetry.tallies import Tally, added_up


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


def observed_report(policy: Policy, all_heard: Sequence[Heard], at_s: float) -> ObservedReport:
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


def _generation(one: Heard) -> str | None:
    return None if one.report.observed is None else one.report.observed.generation


def _by_name(all_told: Iterable[dict[str, Tally]]) -> dict[str, Tally]:
    summed: dict[str, Tally] = {}
    for told in all_told:
        for name, tally in told.items():
            summed.setdefault(name, Tally()).add(tally)
    return summed


def _row(name: str, tally: Tally) -> ObservedRow:
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
