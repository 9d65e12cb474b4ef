"""How many tokens a request is taken to hold, and what the estimate learns from the engines."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.lengths.token_estimates import (
    BYTES_PER_TOKEN,
    FEWEST_TENANTS,
    LONGEST_MODEL_NAME,
    MODELS_REMEMBERED,
    SAMPLED_ABOVE,
    TENANTS_REMEMBERED,
    Estimator,
    NoTokenizer,
    TokenizerCounter,
    tokens_to_hold,
)
from sidecar.payload.decode import MEDIA_TOKENS, Payload, decode
from tests.support.each import each


def completion(text: str = "", *, model: str | None = "m", **fields: object) -> Payload:
    return decode(Api.COMPLETIONS, json.dumps({"prompt": text, "model": model, **fields}).encode())


def with_image(text: str) -> Payload:
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    return decode(Api.CHAT, json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())


def test_text_is_counted_at_four_bytes_a_token() -> None:
    assert Estimator().prompt_tokens(completion("a" * 4000), "acme") == 1001
    assert Estimator().prompt_tokens(completion("é" * 2000), "acme") == 1001


def test_token_ids_need_no_estimate() -> None:
    assert Estimator().prompt_tokens(completion(prompt=[1, 2, 3]), "acme") == 3


def test_an_empty_prompt_holds_its_output_alone() -> None:
    payload = completion("", max_tokens=5)
    assert tokens_to_hold(payload, Estimator().prompt_tokens(payload, "acme"), 512) == 5


def test_the_estimate_comes_to_what_the_engine_reports() -> None:
    estimator, payload = Estimator(), completion("a" * 4000)
    errors = []
    for _ in range(40):
        errors.append(abs(estimator.prompt_tokens(payload, "acme") - 2000))
        estimator.learn(payload, "acme", 2000)
    assert errors == sorted(errors, reverse=True)
    assert errors[10] < 0.55 * errors[0]  # bytes a token come nearer by a tenth each time
    assert errors[-1] < 40


def test_each_model_learns_for_itself() -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.learn(completion("a" * 400, model="dense"), "acme", 400)
    assert estimator.prompt_tokens(completion("a" * 400, model="other"), "acme") == 101
    assert estimator.prompt_tokens(completion("a" * 400, model=None), "acme") == 101
    assert estimator.prompt_tokens(completion("a" * 400, model="dense"), "acme") > 350


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(-5, 10**9)), max_size=30))
def test_no_usage_makes_the_estimate_absurd(reports: list[tuple[int, int]]) -> None:
    estimator = Estimator()
    for size, tokens in reports:
        estimator.learn(completion("a" * size), "acme", tokens)
    assert 1600 // 16 <= estimator.prompt_tokens(completion("a" * 1600), "acme") <= 1601


def test_prompts_with_media_or_token_ids_teach_nothing() -> None:
    estimator = Estimator()
    for payload in (with_image("a" * 400), completion(prompt=[1] * 400)):
        for _ in range(50):
            estimator.learn(payload, "acme", 3000)
    assert estimator.prompt_tokens(completion("a" * 400), "acme") == 101
    assert MEDIA_TOKENS < estimator.prompt_tokens(with_image("a" * 400), "acme") < MEDIA_TOKENS + 120


def test_only_so_many_models_are_remembered_the_latest_used() -> None:
    estimator = Estimator()

    def knows(model: str) -> bool:
        return estimator.bytes_per_token("acme", model) != BYTES_PER_TOKEN

    for number in range(10 * MODELS_REMEMBERED):
        estimator.learn(completion("a" * 400, model="kept"), "acme", 400)
        estimator.learn(completion("a" * 400, model=f"m{number}"), "acme", 400)
    remembered = [model for model in ("kept", *map("m{}".format, range(10 * MODELS_REMEMBERED))) if knows(model)]
    assert len(remembered) == MODELS_REMEMBERED
    assert "kept" in remembered


def test_a_name_that_no_model_has_is_not_remembered() -> None:
    estimator = Estimator()
    estimator.learn(completion("a" * 400, model="m" * (LONGEST_MODEL_NAME + 1)), "acme", 400)
    assert estimator.bytes_per_token("acme", "m" * (LONGEST_MODEL_NAME + 1)) == BYTES_PER_TOKEN


def test_a_thousand_requests_of_one_tenant_leave_the_estimate_of_another_as_it_was() -> None:
    estimator, text = Estimator(), completion("a" * 2000)
    for _ in range(50):
        estimator.learn(text, "acme", 400)
    before, unknown_before = (estimator.prompt_tokens(text, tenant) for tenant in ("acme", "newcomer"))
    for number in range(1000):
        estimator.learn(completion("a" * 2000, model="m" if number % 2 else f"m{number}"), "hostile", 2000)
    assert before == estimator.prompt_tokens(text, "acme")
    assert unknown_before == estimator.prompt_tokens(text, "newcomer")


def test_only_so_many_tenants_are_remembered_the_latest_used() -> None:
    estimator, text = Estimator(), completion("a" * 400)
    for number in range(TENANTS_REMEMBERED + 10):
        estimator.learn(text, "kept", 400)
        estimator.learn(text, f"t{number}", 400)
    assert estimator.bytes_per_token("kept", "m") == pytest.approx(1, abs=0.01)
    assert estimator.bytes_per_token("t0", "m") == estimator.bytes_per_token("newcomer", "m")
    assert len(estimator._learned) == len(estimator._models["m"].by_tenant) == TENANTS_REMEMBERED


def ratio_of(estimator: Estimator, tenant: str, bytes_a_token: int, *, model: str = "m", times: int = 100) -> None:
    for _ in range(times):
        estimator.learn(completion("a" * 400, model=model), tenant, 400 // bytes_a_token)


def test_ratios_of_forgotten_models_count_no_more_and_take_no_memory() -> None:
    estimator = Estimator()
    for tenant in ("a", "b", "c"):
        ratio_of(estimator, tenant, 2)
    for number in range(10 * MODELS_REMEMBERED):
        ratio_of(estimator, "a", 1, model=f"m{number}", times=1)
    assert estimator.bytes_per_token("new", "m") == BYTES_PER_TOKEN
    assert len(estimator._models) == MODELS_REMEMBERED + 1


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([*"mnopq"]), st.sampled_from([25, 50, 100, 200, 400])),
        max_size=200,
    )
)
def test_the_median_is_that_of_the_ratios_but_for_the_last_eighth(events: list[tuple[int, str, int]]) -> None:
    estimator = Estimator()
    medians: dict[str, list[float]] = {}
    for tenant, model, prompt_tokens in events:
        estimator.learn(completion("a" * 400, model=model), f"t{tenant}", prompt_tokens)
        ratios = sorted(known[model].value for known in estimator._learned.values() if model in known)
        medians.setdefault(model, []).append(
            BYTES_PER_TOKEN if len(ratios) < FEWEST_TENANTS else ratios[(len(ratios) - 1) // 2]
        )
        assert estimator.bytes_per_token("new", model) in medians[model][-1 - len(ratios) // 8 :]


def test_the_ratios_of_many_tenants_are_sorted_only_now_and_then_and_where_a_newcomer_asks() -> None:
    estimator, sorts = Estimator(), 0

    def counting(values: object) -> list[float]:
        nonlocal sorts
        sorts += 1
        return sorted(values)  # type: ignore[call-overload, no-any-return]

    text = completion("a" * 400)
    for number in range(800):
        estimator.learn(text, f"t{number}", 400)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sidecar.lengths.token_estimates.sorted", counting, raising=False)
        for number in range(800):
            estimator.learn(text, f"t{number}", 100)
        assert not sorts
        for number in range(800):
            estimator.learn(text, f"t{number}", 100)
            estimator.bytes_per_token("new", "m")
    assert 7 <= sorts <= 9


@each(
    "beside",
    [
        {"documents": [{"text": "x" * 4000}]},
        {"chat_template_kwargs": {"x": "y" * 4000}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 4000}}},
        {"input_ids": [1] * 2000},
        {"prompt_token_ids_b64": "AAAA" * 2000},
        {"previous_response_id": "resp_1"},
        {"next_release": "x"},
        {"nvext": {"token_data": [1] * 2000}},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_a_body_that_is_not_understood_completely_teaches_nothing(beside: dict[str, object]) -> None:
    estimator = Estimator()
    body = {"messages": [{"role": "user", "content": "a" * 400}], "model": "m", **beside}
    for _ in range(50):
        estimator.learn(decode(Api.CHAT, json.dumps(body).encode()), "acme", 4000)
    assert estimator.bytes_per_token("acme", "m") == BYTES_PER_TOKEN


def test_what_is_not_known_counts_no_less_for_a_tenant_whose_text_is_light() -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.learn(completion(" " * 1600), "acme", 100)
    assert estimator.bytes_per_token("acme", "m") > 15
    assert estimator.prompt_tokens(completion("", next_release="x" * 4000), "acme") >= 1000


@each(
    ("fields", "held"),
    [
        ({"prompt": [1] * 10, "max_tokens": 5}, 15),
        ({"prompt": [1] * 10}, 10 + 100),
        ({"prompt": [1] * 10, "max_tokens": 0}, 10),
        ({"prompt": [1] * 10, "max_tokens": 5, "n": 3}, 3 * 15),
        ({"prompt": [1] * 10, "max_tokens": 5, "n": 2, "best_of": 3}, 3 * 15),
        ({"prompt": [[1] * 10, [1] * 20], "max_tokens": 5}, 15 + 25),
        ({"prompt": [[1] * 10, [1] * 20], "max_tokens": 5, "n": 3}, 3 * (15 + 25)),
    ],
)
def test_a_request_holds_prompt_and_output_for_every_sequence(fields: dict[str, object], held: int) -> None:
    payload = completion(**fields)  # type: ignore[arg-type]
    assert tokens_to_hold(payload, Estimator().prompt_tokens(payload, "acme"), 100) == held


def test_embeddings_hold_their_prompts_alone() -> None:
    payload = decode(Api.EMBEDDINGS, b'{"input":[[1,2],[3]]}')
    assert tokens_to_hold(payload, Estimator().prompt_tokens(payload, "acme"), 512) == 3


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token for every word, and a truncation that a count must not be cut by."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_truncation(16)
    words.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return str(path)


@pytest.mark.anyio
@each("words", [1, 100, 5000])
async def test_a_tokenizer_counts_exactly(tokenizer_file: str, words: int) -> None:
    assert await TokenizerCounter(tokenizer_file).count("word " * words) == words


@pytest.mark.anyio
@each("words", [SAMPLED_ABOVE // 4, 60_000, 500_000])
async def test_long_text_is_sampled_within_a_few_percent(tokenizer_file: str, words: int) -> None:
    text = "".join("word " if number % 7 else "longerword " for number in range(words))
    assert await TokenizerCounter(tokenizer_file).count(text) == pytest.approx(words, rel=0.03)


@pytest.mark.anyio
async def test_the_samples_cover_the_whole_text(tokenizer_file: str) -> None:
    text = "word " * 50_000 + "x" * 250_000
    assert await TokenizerCounter(tokenizer_file).count(text) == pytest.approx(50_000, rel=0.15)


@pytest.mark.anyio
async def test_the_loop_runs_on_while_a_tokenizer_counts() -> None:
    goes_on = threading.Event()

    class Slow(TokenizerCounter):
        def __init__(self) -> None:
            pass

        def _count(self, text: str) -> int:
            return len(text) if goes_on.wait(60) else 0

    counting = asyncio.ensure_future(Slow().count("abc"))
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert not counting.done()
    goes_on.set()
    assert await counting == 3


@pytest.mark.anyio
async def test_a_counted_prompt_adds_what_media_are_taken_for(tokenizer_file: str) -> None:
    counter = TokenizerCounter(tokenizer_file)
    estimator = Estimator(counter)
    assert await estimator.counted_prompt_tokens(completion(prompt=["word word", "word"]), counter) == 3
    assert await estimator.counted_prompt_tokens(completion(prompt=[1, 2]), counter) == 2
    counted = await estimator.counted_prompt_tokens(with_image("word " * 10), counter)
    assert MEDIA_TOKENS + 10 <= counted <= MEDIA_TOKENS + 20


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(NoTokenizer, match=r"pip install '\./admission-sidecar\[tokenizers\]'"):
        TokenizerCounter("tokenizer.json")


@each("content", [None, "", "{}", "not json"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json: not a tokenizer\.json"):
        TokenizerCounter(str(path))
