"""The one sentence that a rollout is decided by: whom enforcing would have refused, and whom it would have held."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.live.words import duration
from sidecar.policy.policy import Mode
from sidecar.telemetry.tallies import Tally

_MOST_NAMED = 3


def conclusion(mode: Mode, total: Tally, by_tier: Mapping[str, Tally], undecided: int) -> str:
    """What enforcing would have done, in sentences; `undecided` requests would still be waiting."""
    if mode is not Mode.OBSERVE:
        return "Nothing is observed: this policy is enforced. Write `mode: observe` into it to see what it would do."
    if not total.requests:
        return "No request has been observed yet by this policy."
    return " ".join([_refused(total, by_tier), _waited(total, by_tier), *_not_known(total, undecided)])


def _refused(total: Tally, by_tier: Mapping[str, Tally]) -> str:
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


def _waited(total: Tally, by_tier: Mapping[str, Tally]) -> str:
    sentence = "Nobody would have waited and then been admitted"
    if total.waited:
        longest = max(by_tier, key=lambda name: by_tier[name].wait_max_us)
        most = f"{duration(total.wait_max_us / 1e6)} ({longest})"
        share = _share(total.waited, total.requests)
        sentence = f"{total.waited:,} ({share}) would have waited before they were admitted, the longest {most}"
    if not total.starved:
        return f"{sentence}; nobody would have starved."
    starved = max(by_tier, key=lambda name: by_tier[name].starvation_max_us)
    most = f"{duration(total.starvation_max_us / 1e6)} ({starved})"
    return f"{sentence}; {total.starved:,} would have starved, the longest {most}."


def _not_known(total: Tally, undecided: int) -> list[str]:
    unknown = sum(total.unknown.values())
    said = [f"Of {unknown:,} it is not known ({', '.join(total.unknown)})."] if unknown else []
    return [*said, f"{undecided:,} more would still be waiting."] if undecided else said


def _of_all(number: int, requests: int) -> str:
    noun = "request" if requests == 1 else "requests"
    return f"{number or 'none'} of {requests:,} {noun}" + (f" ({_share(number, requests)})" if number else "")


def _share(number: int, requests: int) -> str:
    percent = 100 * number / requests
    return "under 0.1%" if percent < 0.05 else f"{percent:.1f}%" if percent < 9.95 else f"{percent:.0f}%"
