"""The bytes and events of tokens, as answers teach them: each tenant for itself, and in bounded memory."""

from __future__ import annotations

import pytest

from sidecar.lengths.histogram import LONGEST_MODEL_NAME, MOST_KEPT, MOST_TOKENS_PER_EVENT, OutputRatios


def test_one_token_an_event_counts_so_however_long_its_text_is() -> None:
    ratio = OutputRatios().of("a", "m")
    assert ratio.tokens(100, 700) == 100  # 7 bytes each, and nothing is known
    ratio.learn(100, 100, 400)
    assert ratio.tokens(100, 420) == 100  # texts vary by as much
    assert ratio.tokens(100, 480) == 120
    assert ratio.tokens(100, 10) == 100


def test_a_newer_answer_moves_the_ratios_by_a_tenth_and_no_event_has_any_number() -> None:
    ratio = OutputRatios().of("a", "m")
    ratio.learn(100, 10, 400)
    ratio.learn(100, 20, 500)
    assert (ratio.bytes_per_token, ratio.tokens_per_event) == (pytest.approx(4.1), pytest.approx(9.5))
    assert ratio.tokens(10, None) == 95
    lied = OutputRatios().of("a", "m")
    lied.learn(2**40, 1, None)
    assert lied.tokens(10, None) == 10 * MOST_TOKENS_PER_EVENT


def test_no_tenant_moves_another_and_the_least_recently_used_goes_first() -> None:
    ratios = OutputRatios()
    ratios.of("a", "m").learn(100, 10, None)
    assert ratios.of("b", "m").tokens(10, None) == ratios.of("a", "other").tokens(10, None) == 10
    ratios.of("a", "x" * (LONGEST_MODEL_NAME + 1)).learn(100, 10, None)
    assert ratios.of("a", "x" * (LONGEST_MODEL_NAME + 1)).tokens(10, None) == 10
    for number in range(MOST_KEPT - 1):
        ratios.of("c", str(number))
    assert ratios.of("a", "m").tokens(10, None) == 10
