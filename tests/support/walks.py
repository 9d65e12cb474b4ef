"""Random operations that follow from a seed: a property of many seeds, of which none is simpler than another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""A shorter example takes minutes to find, where there is any."""
SHARED = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
"""All examples of a test share its fixtures: a server that they empty, say."""


def random_walks(few: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of a test with an argument `seed`: so many by default, four times as many in CI's second step."""

    def decorated(test: Callable[..., Any]) -> Callable[..., Any]:
        chosen = settings(max_examples=examples(few), phases=PHASES, suppress_health_check=SHARED)
        return chosen(given(seed=st.integers(0, 2**32))(test))

    return decorated
