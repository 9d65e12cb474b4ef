"""Affinity: prefix and session together, per tenant, in bounded memory, corrected by what the engines report."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.fleet.affinity import NOTHING, PROMPT_CACHE_KEY, AffinityPredictor, Prediction, Session, Sessions

HEADER = b"x-session-id"
LARGEST_REST = 128
"""Tokens of a prompt of 4,000 bytes that may be in no full block."""
ENGINES = {"a#1": 100_000, "b#1": 100_000}


def affinity(**options: Any) -> AffinityPredictor:
    found = AffinityPredictor(**{"session": (HEADER, PROMPT_CACHE_KEY), **options})
    found.set_engines(ENGINES)
    return found


def body(*texts: str, **fields: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def predict(
    pool: AffinityPredictor, *texts: str, tenant: str = "t", session: bytes | None = None, **fields: Any
) -> Prediction:
    headers = {} if session is None else {HEADER: session}
    tokens = sum(map(len, texts)) // 4 + 1
    return pool.predict(tenant, Api.CHAT, body(*texts, **fields), headers, tokens)


def serve(pool: AffinityPredictor, engine_id: str, *texts: str, output_tokens: int = 0, **options: Any) -> Prediction:
    counts = {name: options.pop(name) for name in ("prompt_tokens", "cached_tokens") if name in options}
    prediction = predict(pool, *texts, **options)
    pool.sent(prediction, engine_id)
    pool.ended(prediction, output_tokens=output_tokens, **counts)
    return prediction


def text(name: str, size: int = 4_000) -> str:
    return random.Random(name).randbytes(size // 2).hex()


def test_the_next_turn_is_predicted_where_the_first_one_was_served() -> None:
    pool = affinity()
    assert serve(pool, "b#1", text("q")).hits == ()
    ((engine_id, tokens),) = predict(pool, text("q"), text("a"), text("q2")).hits
    assert engine_id == "b#1"
    assert 1_000 - LARGEST_REST <= tokens <= 1_000


def test_a_session_knows_the_answer_too_and_never_more_than_the_prompt() -> None:
    pool = affinity()
    serve(pool, "b#1", text("q"), session=b"s", output_tokens=500)
    hits = predict(pool, text("q"), text("a"), text("q2"), session=b"s").hits
    assert hits == (("b#1", 1_001 + 500),)
    assert predict(pool, text("other", 400), session=b"s").hits == (("b#1", 101),)


def test_the_larger_of_both_counts_and_the_best_engine_comes_first() -> None:
    pool = affinity()
    serve(pool, "a#1", text("q"), session=b"s")
    serve(pool, "b#1", text("q"), text("a"), text("q2"))
    hits = predict(pool, text("q"), text("a"), text("q2"), text("a2"), session=b"s").hits
    assert [engine_id for engine_id, _ in hits] == ["b#1", "a#1"]
    serve(pool, "a#1", text("other"), session=b"s", output_tokens=3_000)
    hits = predict(pool, text("q"), text("a"), text("q2"), text("a2"), session=b"s").hits
    assert hits[0] == ("a#1", 4_001)


def test_a_session_belongs_to_its_tenant() -> None:
    pool = affinity()
    serve(pool, "b#1", text("q", 100), tenant="ann", session=b"s", output_tokens=900)
    serve(pool, "b#1", text("q", 100), tenant="ann", prompt_cache_key="s", output_tokens=900)
    assert predict(pool, text("x"), tenant="bob", session=b"s").hits == ()
    assert predict(pool, text("x"), tenant="bob", prompt_cache_key="s").hits == ()
    assert predict(pool, text("x"), tenant="ann", session=b"s").hits != ()


def test_a_header_and_a_cache_key_of_the_same_name_are_two_sessions_and_the_first_source_counts() -> None:
    pool = affinity()
    serve(pool, "a#1", text("q", 100), session=b"s", output_tokens=900)
    assert predict(pool, text("x"), prompt_cache_key="s").hits == ()
    serve(pool, "b#1", text("q", 100), prompt_cache_key="k", output_tokens=900)
    assert predict(pool, text("x"), session=b"s", prompt_cache_key="k").hits[0][0] == "a#1"
    assert predict(pool, text("x"), session=b"x" * 100_000, prompt_cache_key="k").hits[0][0] == "b#1"


@pytest.mark.parametrize("key", [None, 7, [], {}, "", True, "k" * 1_000_000])
def test_a_cache_key_of_another_kind_or_a_megabyte_names_no_session(key: Any) -> None:
    pool = affinity()
    serve(pool, "a#1", text("q", 100), prompt_cache_key=key, output_tokens=900)
    assert len(pool.sessions) == 0
    assert predict(pool, text("x"), prompt_cache_key=key).hits == ()


def test_without_sources_nothing_is_remembered_and_without_prefix_only_sessions_count() -> None:
    pool = affinity(session=())
    serve(pool, "a#1", text("q"), session=b"s")
    assert len(pool.sessions) == 0
    pool = affinity(prefix=False)
    serve(pool, "a#1", text("q"), session=b"s")
    assert predict(pool, text("q")).hits == ()
    assert predict(pool, text("q"), text("a"), session=b"s").hits == (("a#1", 1_001),)
    assert len(pool.tables["a#1"]) == 0


def test_a_restarted_engine_is_predicted_to_have_nothing_of_a_session() -> None:
    pool = affinity()
    serve(pool, "a#1", text("q"), session=b"s")
    late = predict(pool, text("q"), session=b"s")
    pool.sent(late, "a#1")
    pool.set_engines({"a#2": 100_000, "b#1": 100_000})
    pool.ended(late, prompt_tokens=1_000, cached_tokens=900, output_tokens=5)
    assert predict(pool, text("q"), session=b"s").hits == ()
    pool.sent(late, "gone#1")
    pool.ended(late)


def test_a_session_is_forgotten_when_its_engine_has_taken_a_whole_cache_of_other_prompts_since() -> None:
    pool = affinity()
    serve(pool, "a#1", text("q"), session=b"s", output_tokens=500)
    for number in range(90):
        serve(pool, "a#1", text(f"n{number}"))
    assert predict(pool, text("q"), text("a"), session=b"s").hits[0][1] >= 1_500
    for number in range(20):
        serve(pool, "a#1", text(f"m{number}"))
    assert predict(pool, text("q"), text("a"), session=b"s").hits == ()


def test_a_name_that_stands_for_no_conversation_soon_predicts_only_what_is_found() -> None:
    """A user's name in the header, and every prompt another one that shares 100 tokens with the last."""
    pool = affinity(prefix=False)
    predicted = []
    for number in range(6):
        prediction = serve(
            pool, "a#1", text(f"n{number}"), session=b"ann", prompt_tokens=1_000, cached_tokens=100, output_tokens=9
        )
        predicted.append(prediction.tokens_at("a#1"))
    assert predicted == [0, 1_001, 100, 100, 100, 100]


def test_an_engine_that_reports_no_cached_tokens_keeps_the_configured_size() -> None:
    pool = affinity()
    for number in range(200):
        serve(pool, "a#1", text(f"n{number % 60}"), prompt_tokens=1_000, cached_tokens=None)
    assert pool.tables["a#1"].scale == 1.0
    assert pool.tables["a#1"].measured_tokens == 0


def test_a_count_that_is_left_out_is_zero_at_an_engine_that_reports_others() -> None:
    """vLLM and SGLang leave out `cached_tokens` where it is 0."""
    pool = affinity()
    for number in range(200):
        serve(pool, "a#1", text(f"n{number % 60}"), prompt_tokens=1_000, cached_tokens=None if number else 1)
    assert pool.tables["a#1"].scale < 0.7
    assert pool.tables["b#1"].scale == 1.0


def test_several_prompts_in_one_request_teach_nothing() -> None:
    pool = affinity()
    for number in range(200):
        prompts = json.dumps({"prompt": [text(f"n{number % 60}"), "x"]}).encode()
        prediction = pool.predict("t", Api.COMPLETIONS, prompts, {}, 1_000)
        pool.sent(prediction, "a#1")
        pool.ended(prediction, prompt_tokens=1_000, cached_tokens=1)
    assert pool.tables["a#1"].scale == 1.0
    assert pool.tables["a#1"].predicted_tokens == 0


def test_a_request_that_is_sent_again_is_predicted_and_measured_where_it_was_sent_last() -> None:
    pool = affinity()
    serve(pool, "b#1", text("q"))
    prediction = predict(pool, text("q"))
    pool.sent(prediction, "a#1")
    pool.sent(prediction, "b#1")
    pool.ended(prediction, prompt_tokens=1_000, cached_tokens=900)
    assert pool.tables["a#1"].measured_tokens == 0
    assert pool.tables["b#1"].measured_tokens == 900
    assert 1_000 - LARGEST_REST <= pool.tables["b#1"].predicted_tokens <= 1_000


@pytest.mark.parametrize(
    ("options", "short"),
    [({"prefix": False, "session": ()}, False), ({"session": ()}, True), ({"session": (HEADER,)}, True)],
)
def test_what_has_no_full_block_and_no_session_is_not_read(
    options: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = affinity(**options)
    monkeypatch.setattr("sidecar.fleet.affinity.prompt_bytes", None)  # a call of it would fail
    asked = "hello" if short else text("q")
    assert serve(pool, "a#1", asked, prompt_tokens=9, cached_tokens=9, output_tokens=5) is NOTHING
    assert (NOTHING.hits, NOTHING._engine_id) == ((), None)
    assert len(pool.tables["a#1"]) == pool.tables["a#1"].entered_tokens == 0


def test_a_short_body_with_an_image_is_read() -> None:
    pool = affinity(session=())
    image = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y"}}]}]}'
    for expected in (0, 1_000):
        prediction = pool.predict("t", Api.CHAT, image, {}, 1_030)
        assert prediction.tokens_at("a#1") >= expected - LARGEST_REST
        pool.sent(prediction, "a#1")
        pool.ended(prediction)


def test_what_never_was_sent_changes_nothing() -> None:
    pool = affinity()
    pool.ended(predict(pool, text("q"), session=b"s"), prompt_tokens=1_000, cached_tokens=0)
    assert predict(pool, text("q"), session=b"s").hits == ()


SETS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30)), max_size=120)


@given(SETS, st.integers(1, 20))
def test_sessions_are_bounded_and_each_tenants_newest_are_kept(steps: list[tuple[str, int]], most: int) -> None:
    sessions = Sessions(most)
    used: dict[str, list[int]] = {}
    for tenant, name in steps:
        sessions.set(tenant, name, Session("e#1", name, name, 0))
        mine = used.setdefault(tenant, [])
        if name in mine:
            mine.remove(name)
        mine.append(name)
        kept = {of: [at for at in names if sessions.get(of, at) is not None] for of, names in used.items()}
        assert len(sessions) == sum(map(len, kept.values())) <= most
        for of, names in kept.items():  # what is kept is the newest of each tenant
            assert names == used[of][len(used[of]) - len(names) :]
        assert sessions.get(tenant, name) is not None or most < len(used)


def test_a_tenant_with_a_million_sessions_pushes_out_its_own() -> None:
    sessions = Sessions(1_000)
    for number in range(100):
        sessions.set("quiet", number, Session("e#1", 1, 1, 0))
    for number in range(1_000_000 // 20):
        sessions.set("flood", number, Session("e#1", 1, 1, 0))
    assert len(sessions) == 1_000
    assert all(sessions.get("quiet", number) for number in range(100))


def test_a_session_costs_at_most_500_bytes() -> None:
    sessions = Sessions(5_000)
    tracemalloc.start()
    for number in range(20_000):
        sessions.set("t", hash(str(number)), Session("engine#1", 10**6 + number, 10**6 + number, 10**9 + number))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / 5_000 < 500
