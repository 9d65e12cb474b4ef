"""Policy generations of a pool: which policy each replica runs, and since when it differs from this process.

A roll-out changes replicas one after the other, and a report is a few seconds old. So a difference becomes a notice
only when it lasts longer than that takes. The list of replicas shows it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.cluster.report import ReplicaReport

LASTING_S = 5.0
"""Two reports of another replica, which come every two seconds, and some time on the way."""


class Generations:
    """The last reports of the other replicas. Times are seconds on one calendar, `at_s` is now."""

    def __init__(self) -> None:
        self._others: dict[str, ReplicaReport] = {}
        self._differs: dict[str, tuple[str, str, float]] = {}  # replica -> both generations, and since when

    def hear(self, reports: Iterable[ReplicaReport], own: str, at_s: float) -> None:
        """The other replicas that are there, as they are now, without those that do not say what they run."""
        self._others = {report.replica: report for report in reports if report.generation}
        differs: dict[str, tuple[str, str, float]] = {}
        for replica, report in self._others.items():
            theirs, before = report.generation, self._differs.get(replica)
            if theirs != own:
                is_as_before = before is not None and before[:2] == (theirs, own)
                differs[replica] = before if before and is_as_before else (theirs, own, at_s)
        self._differs = differs

    def count(self, own: str) -> int:
        """How many different ones there are, `own` among them."""
        return len({own, *(report.generation for report in self._others.values())})

    def running(self, replica: str, own: str) -> Mapping[str, Sequence[str]]:
        """The replicas by what they run, `replica` itself among them."""
        found: dict[str, list[str]] = {own: [replica]}
        for name, report in sorted(self._others.items()):
            found.setdefault(report.generation, []).append(name)
        return found

    def notices(self, own: str, at_s: float) -> list[str]:
        """Differences that last, in a sentence for each generation that is not `own`."""
        lasting: dict[str, list[tuple[str, float]]] = {}
        for replica, (theirs, ours, since_s) in self._differs.items():
            if ours == own and at_s - since_s >= LASTING_S:
                lasting.setdefault(theirs, []).append((replica, at_s - since_s))
        return [self._notice(theirs, own, replicas) for theirs, replicas in sorted(lasting.items())]

    def _notice(self, theirs: str, own: str, replicas: Sequence[tuple[str, float]]) -> str:
        (first, _), *more = replicas
        who = f"replica {first[:8]} on {self._others[first].host}"
        verb = "runs" if not more else f"and {len(more)} more run"
        for_s = max(lasting_s for _, lasting_s in replicas)
        return f"{who} {verb} policy generation {theirs}, this one {own}, for {for_s:.0f} s"
