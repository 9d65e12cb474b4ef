"""The sentences about a request's size: what it entered with, from which source, and how its lease moved."""

from __future__ import annotations

from typing import Any

import msgspec

from sidecar.admin.request_page import story_page
from sidecar.events import Outcome, Settled
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import Explanation, RequestFacts, SizeDetails
from sidecar.explain.steps import entered, moved, steps
from sidecar.telemetry.journal import Journal
from tests.support.each import each
from tests.telemetry.span_stories import (
    ARRIVAL_US,
    EXPECTED,
    admitted,
    begin,
    classified,
    first_byte,
    received,
    settled,
)

FACTS = RequestFacts(
    "acme", "high", "key", None, "chat", "m", stream=True, tokens=1243, requests=1, max_output_tokens=4096
)
SIZE = SizeDetails(243, 1, "own", 1532, 0.95, 1.0, 5096, 1000, 3.9, "tools, max 4k")
OF = "of tenant acme on /v1/chat/completions, model m, bucket `tools, max 4k`"


def story(size: SizeDetails | None = SIZE, facts: RequestFacts | None = FACTS, **more: Any) -> Explanation:
    journal = Journal(now_us=lambda: ARRIVAL_US + 100_000)
    tell = begin(journal, received(), None)
    for event in (classified(), admitted(), settled(90_000)):
        tell(event)
    (record,) = journal.all_for("request-1")
    found = ExplanationBuilder(journal, lambda: ["high", "batch"], "default", is_shared=False).story(record)
    return msgspec.structs.replace(found, asked=facts, size=size, **more)


def test_the_sentence_of_the_tenants_own_answers() -> None:
    assert entered(story()) == (
        f"It entered with 1,243 tokens: prompt 1,000 (at 3.9 bytes a token), output 243 (95% of 1,532 answers {OF}); "
        "max_tokens would have held 5,096"
    )


@each(
    ("changes", "said"),
    [
        (
            {"source": "tenants", "quantile": 0.9875},
            "output 243 (98.75% of the answers of the median tenant, of 1,532 answers on /v1/chat/completions; too few "
            "are known of tenant acme itself, model m, bucket `tools, max 4k`);",
        ),
        ({"source": "a newer one"}, f"output 243 (a newer one, 1,532 answers {OF});"),
        ({"bytes_per_token": None}, "prompt 1,000, output 243 "),
        ({"sequences": 4, "prompt_tokens": 271}, "prompt 271 (at 3.9 bytes a token), output 4 x 243 ("),
        ({"samples": 1}, "(95% of 1 answer of tenant"),
    ],
)
def test_the_sentence_of_each_source(changes: dict[str, Any], said: str) -> None:
    sentence = entered(story(msgspec.structs.replace(SIZE, **changes)))
    assert said in sentence


def test_where_nothing_is_known_the_old_rule_holds() -> None:
    size = msgspec.structs.replace(SIZE, source="maximum", output_tokens=4096, samples=0, quantile=0.0)
    facts = msgspec.structs.replace(FACTS, tokens=5096)
    assert entered(story(size, facts)) == (
        "It entered with 5,096 tokens: prompt 1,000 (at 3.9 bytes a token), output 4,096 (its max_tokens: too few "
        f"answers are known {OF})"
    )
    assumed = entered(story(size, msgspec.structs.replace(facts, max_output_tokens=None)))
    assert "output 4,096 (the most that the policy assumes: too few" in assumed


def test_the_overlap_is_said_where_it_counts_and_what_a_tier_cuts() -> None:
    size = msgspec.structs.replace(SIZE, overlap=0.8333)
    sentence = entered(story(size, msgspec.structs.replace(FACTS, tokens=1036)))
    assert sentence.endswith(
        "`), counted at 0.833 because requests end at different times; max_tokens would have held 5,096"
    )
    cut = entered(story(SIZE, msgspec.structs.replace(FACTS, tokens=1200, max_output_tokens=None)))
    assert ", and no more than one request of its tier may hold; the output that the policy assumes would" in cut


def test_a_request_that_is_not_admitted_asked_and_one_of_the_dry_run_would_have() -> None:
    refused = entered(story(admitted=None))
    assert refused.startswith("It asked for 1,243 tokens")
    assert entered(story(facts=None)) is None
    assert entered(story(size=None)) is None


@each(
    ("held", "growths", "said"),
    [
        (
            1243,
            0,
            "It held 1,243 at its end, and never grew. It really used 712, 200 of them output, by the engine's count",
        ),
        (1300, 1, "It held 1,300 at its end after it grew once. "),
        (1300, 2, "It held 1,300 at its end after it grew twice. "),
        (1300, 9, "It held 1,300 at its end after it grew 9 times. "),
    ],
)
def test_how_its_lease_moved(held: int, growths: int, said: str) -> None:
    sentence = moved(story(msgspec.structs.replace(SIZE, held_tokens=held, growths=growths)))
    assert sentence.startswith(said)


def test_while_it_runs_nothing_is_said_of_its_end() -> None:
    assert moved(story()) is None
    assert moved(story(ended=None)) is None


def test_the_story_has_both_from_the_requests_events_and_the_page_shows_them() -> None:
    journal = Journal(now_us=lambda: ARRIVAL_US + 100_000)
    tell = begin(journal, received(), None)
    asked = msgspec.structs.replace(classified(), expected=EXPECTED)
    end = Settled(settled(90_000).at_us, Outcome.COMPLETED, 200, 712, 512, None, None, held_tokens=900, growths=2)
    for event in (asked, admitted(), first_byte(30_000), end):
        tell(event)
    (record,) = journal.all_for("request-1")
    found = ExplanationBuilder(journal, lambda: ["high", "batch"], "default", is_shared=False).story(record)
    said = {step.label: step.text for step in steps(found)}
    assert said["sized"].startswith(
        "It entered with 800 tokens: prompt 700 (at 3.9 bytes a token), output 2 x 100 (95% of"
    )
    assert said["lease"] == "It held 900 at its end after it grew twice. It really used 712, by our estimate"
    page = story_page(found)
    assert "output 2 x 100" in page
    assert "after it grew twice" in page
    decoded = msgspec.json.decode(msgspec.json.encode(found), type=Explanation)
    assert decoded.size == SizeDetails(
        100, 2, "own", 1532, 0.95, 0.83, 1000, 700, 3.9, "plain", held_tokens=900, growths=2
    )
