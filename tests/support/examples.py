"""How many examples a property tries that is too costly, or too cheap, for the number of its profile."""

from __future__ import annotations

from hypothesis import settings

_TIMES = 1 if settings.default.max_examples == settings.get_profile("few").max_examples else 4


def examples(few: int) -> int:
    """So many by default, and four times as many in CI's second step: for `@settings(max_examples=examples(10))`."""
    return few * _TIMES
