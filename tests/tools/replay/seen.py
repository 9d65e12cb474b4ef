"""What clients saw, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidecar.tools.loadgen import Planned, Seen
from sidecar.tools.replay.figures import measure
from sidecar.tools.replay.run import ReplayedTrace

TIERS = ("high", "normal", "batch")


def seen(
    tier: str,
    sent_s: float,
    ttft_s: float | None,
    *,
    runs_s: float = 1.0,
    output_tokens: int = 11,
    prompt_tokens: int | None = 64,
    error: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Seen:
    """A request that had its first token after `ttft_s`, and the rest `runs_s` after that."""
    first_s = None if ttft_s is None else sent_s + ttft_s
    return Seen(
        planned=Planned(sent_s, "/v1/chat/completions", {}, b"", tier),
        sent_s=sent_s,
        first_token_s=first_s,
        end_s=(sent_s if first_s is None else first_s) + runs_s,
        status=200 if error is None else 503,
        error=error,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        headers=headers or {},
        request_id="chatcmpl-1",
        url_index=0,
    )


def played(
    found: Sequence[Seen], tiers: Sequence[str] = TIERS, name: str = "replay", title: str = "by priority"
) -> ReplayedTrace:
    """A run of them."""
    return ReplayedTrace(measure(name, title, tiers, found, [64] * len(found)), found)
