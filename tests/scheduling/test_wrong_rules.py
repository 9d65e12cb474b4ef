"""Negative controls: the scenarios notice each rule that is broken."""

from __future__ import annotations

import pytest

from tests.scheduling.player import first_difference
from tests.scheduling.programs import scenarios
from tests.scheduling.wrong_rules import CHANGES, PATCHES, changed
from tests.support.each import each

SCENARIOS = scenarios()


@each("name", PATCHES)
def test_the_answers_are_others_where_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PATCHES[name])
    assert any(map(first_difference, SCENARIOS))


@each("name", CHANGES)
def test_the_answers_are_others_where_it_leaves_a_word_out(name: str) -> None:
    assert any(first_difference(changed(scenario, name)) for scenario in SCENARIOS)
