"""Generation rate: output tokens a second, as SGLang measures it.

The mean over the last 40 steps that decoded, idle time between them included: `gen_throughput` in `log_decode_stats`
(`scheduler_metrics_mixin.py`), with `--decode-log-interval` as it comes. Between two measurements the last one stands;
after 30 idle seconds it is 0 (`maybe_log_idle_metrics`).
"""

from __future__ import annotations

INTERVAL_STEPS = 40
FORGOTTEN_AFTER_S = 30.0


class GenerationRate:
    """Measures while steps are added. 0 before the first measurement."""

    def __init__(self) -> None:
        self._measured = 0.0
        self._last_s = 0.0
        self._since_s: float | None = None
        self._steps = 0
        self._tokens = 0

    def add(self, tokens: int, now_s: float) -> None:
        """A step that ends now, and how many tokens it gave. One without any is prefill alone, and does not count."""
        self._last_s = now_s
        if self._since_s is None:
            self._since_s = now_s
        if not tokens:
            return
        self._steps += 1
        self._tokens += tokens
        if self._steps == INTERVAL_STEPS:
            self._measured = self._tokens / max(now_s - self._since_s, 1e-9)
            self._since_s, self._steps, self._tokens = now_s, 0, 0

    def tokens_per_s(self, now_s: float) -> float:
        """Rate that the engine reports now."""
        return self._measured if now_s - self._last_s <= FORGOTTEN_AFTER_S else 0.0
