"""Plays the worked example of docs/how-it-works.md on the real scheduler, and prints what it decided."""

from __future__ import annotations

from pathlib import Path

from sidecar.policy.compiler import load

from sidecar.scheduling import Admission, Scheduler

# (second, what happens, request, tier, tokens)
STEPS = (
    (0, "arrives", "A", "batch", 900),
    (1, "arrives", "B", "batch", 300),
    (2, "arrives", "C", "normal", 400),
    (3, "arrives", "D", "high", 100),
    (4, "arrives", "E", "high", 300),
    (10, "ends", "A", "", 0),
    (12, "arrives", "F", "normal", 50),
    (15, "ends", "D", "", 0),
    (20, "ends", "E", "", 0),
)


def main() -> None:
    """Prints one line per step, and one for each request that it admitted."""
    policy = load(Path(__file__).with_name("policy.yaml"))
    names = [tier.name for tier in policy.tiers]
    scheduler = Scheduler(policy.rules)
    for second, event, request, tier, tokens in STEPS:
        now_us = second * 1_000_000
        if event == "arrives":
            scheduler.submit(request, tier=names.index(tier), tokens=tokens, now_us=now_us)
            print(f"{second:>3} s  {request} arrives: {tier}, {tokens} tokens")
        else:
            scheduler.settle(request, now_us)
            print(f"{second:>3} s  {request} ends")
        for admission in scheduler.dispatch(now_us):
            print(f"         {said(admission, names)}")


def said(admission: Admission, names: list[str]) -> str:
    """An admission as a sentence."""
    wait = admission.wait
    if not wait.queue_wait_us:
        return f"{admission.ticket.id} is admitted at once"
    ahead = ", ".join(f"{tokens} of {name}" for name, tokens in zip(names, wait.served_ahead, strict=True) if tokens)
    return (
        f"{admission.ticket.id} is admitted: queued {wait.queue_wait_us / 1e6:g} s, "
        f"starved {wait.starvation_us / 1e6:g} s, served ahead {ahead or 'nothing'}"
    )


if __name__ == "__main__":
    main()
