"""How many examples a property tries that is too costly, or too cheap, for the number of its profile."""

from __future__ import annotations

from hypothesis import settings

_FEW = settings.get_profile("few").max_examples


def examples(few: int) -> int:
    """So many by default, and eight times as many in CI's second step: for `@settings(max_examples=examples(10))`."""
    return few * settings.default.max_examples // _FEW
