"""Comparison of a replay with its control: which requests failed in which run, and waits over all of them.

Percentiles of the answered requests alone flatter a run that refuses many: what it refuses does not wait. So here a
failed request counts as one whose first token never comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sidecar.tools.replay.figures import TtftOfAll, door_wait
from sidecar.tools.replay.run import ReplayedTrace


@dataclass(frozen=True, slots=True)
class TierComparison:
    """One tier in both runs. The same arrival is one request. `replay_ttft_s`, `control_ttft_s` count failures."""

    requests: int
    failed_in_both: int
    failed_in_replay_alone: int
    failed_in_control_alone: int
    replay_ttft_s: TtftOfAll | None
    control_ttft_s: TtftOfAll | None

    @property
    def failed_in_replay(self) -> int:
        """All that failed in the replay."""
        return self.failed_in_both + self.failed_in_replay_alone

    @property
    def failed_in_control(self) -> int:
        """All that failed in the control."""
        return self.failed_in_both + self.failed_in_control_alone


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs. `control_under_admission` is how many of the control's answers admission control has delayed."""

    tiers: Mapping[str, TierComparison]
    control_under_admission: int

    def total(self, name: str) -> int:
        """The sum of a count over the tiers."""
        return sum(int(getattr(tier, name)) for tier in self.tiers.values())


def comparison(played: Sequence[ReplayedTrace]) -> Comparison | None:
    """The comparison of a replay with its control, which have the same arrivals in the same order. None for one run."""
    if len(played) < 2:
        return None
    replay, control = played
    tiers: dict[str, TierComparison] = {}
    for tier, figures in replay.figures.tiers.items():
        pairs = [
            (one.is_complete, other.is_complete)
            for one, other in zip(replay.seen, control.seen, strict=True)
            if one.planned.label == tier
        ]
        tiers[tier] = TierComparison(
            requests=len(pairs),
            failed_in_both=pairs.count((False, False)),
            failed_in_replay_alone=pairs.count((False, True)),
            failed_in_control_alone=pairs.count((True, False)),
            replay_ttft_s=figures.ttft_of_all_s,
            control_ttft_s=control.figures.tiers[tier].ttft_of_all_s,
        )
    return Comparison(tiers, sum(door_wait(one.headers) is not None for one in control.seen))


def verdict(found: Comparison) -> Sequence[str]:
    """Sentences on the failures of both runs, and on a control that was not neutral."""
    replay, control = found.total("failed_in_replay_alone"), found.total("failed_in_control_alone")
    both, requests = found.total("failed_in_both"), found.total("requests")
    lines = [
        f"Failed of {requests} requests: {replay} in the replay alone, {control} in the control alone, {both} in both."
    ]
    if found.control_under_admission:
        lines.append(
            f"This control was NOT neutral: {found.control_under_admission} of its requests went through admission "
            "control. Do not compare the two runs."
        )
    elif replay > control:
        lines.append(
            "The replay failed more requests than the control, and had less to serve: compare the waits over all "
            "requests, in which a failed one never has its first token."
        )
    elif control > replay:
        lines.append(
            "The control failed more requests than the replay, without admission control: the engine refused them, or "
            "they took too long. Its errors say which."
        )
    return lines
