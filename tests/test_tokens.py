"""How many tokens a request is taken to hold, and what the estimate learns from the engines."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.payload import MEDIA_TOKENS, Payload, read
from sidecar.policy.policy import Api
from sidecar.tokens import (
    LONGEST_MODEL_NAME,
    MODELS_REMEMBERED,
    SAMPLED_ABOVE,
    Estimator,
    NoTokenizer,
    TokenizerCounter,
    tokens_to_hold,
)


def completion(text: str = "", *, model: str | None = "m", **fields: object) -> Payload:
    return read(Api.COMPLETIONS, json.dumps({"prompt": text, "model": model, **fields}).encode())


def with_image(text: str) -> Payload:
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    return read(Api.CHAT, json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())


def test_text_is_counted_at_four_bytes_a_token() -> None:
    assert Estimator().prompt_tokens(completion("a" * 4000)) == 1001
    assert Estimator().prompt_tokens(completion("é" * 2000)) == 1001


def test_token_ids_need_no_estimate() -> None:
    assert Estimator().prompt_tokens(completion(prompt=[1, 2, 3])) == 3


def test_an_empty_prompt_holds_its_output_alone() -> None:
    payload = completion("", max_tokens=5)
    assert tokens_to_hold(payload, Estimator().prompt_tokens(payload), 512) == 5


def test_the_estimate_comes_to_what_the_engine_reports() -> None:
    estimator, payload = Estimator(), completion("a" * 4000)
    errors = []
    for _ in range(40):
        errors.append(abs(estimator.prompt_tokens(payload) - 2000))
        estimator.learn(payload, 2000)
    assert errors == sorted(errors, reverse=True)
    assert errors[10] < 0.55 * errors[0]  # bytes a token come nearer by a tenth each time
    assert errors[-1] < 40


def test_each_model_learns_for_itself() -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.learn(completion("a" * 400, model="dense"), 400)
    assert estimator.prompt_tokens(completion("a" * 400, model="other")) == 101
    assert estimator.prompt_tokens(completion("a" * 400, model=None)) == 101
    assert estimator.prompt_tokens(completion("a" * 400, model="dense")) > 350


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(-5, 10**9)), max_size=30))
def test_no_usage_makes_the_estimate_absurd(reports: list[tuple[int, int]]) -> None:
    estimator = Estimator()
    for size, tokens in reports:
        estimator.learn(completion("a" * size), tokens)
    assert 1600 // 16 <= estimator.prompt_tokens(completion("a" * 1600)) <= 1601


def test_prompts_with_media_or_token_ids_teach_nothing() -> None:
    estimator = Estimator()
    for payload in (with_image("a" * 400), completion(prompt=[1] * 400)):
        for _ in range(50):
            estimator.learn(payload, 3000)
    assert estimator.prompt_tokens(completion("a" * 400)) == 101
    assert MEDIA_TOKENS < estimator.prompt_tokens(with_image("a" * 400)) < MEDIA_TOKENS + 120


def test_only_so_many_models_are_remembered_the_latest_used() -> None:
    estimator = Estimator()
    for number in range(10 * MODELS_REMEMBERED):
        estimator.learn(completion("a" * 400, model="kept"), 400)
        estimator.learn(completion("a" * 400, model=f"m{number}"), 400)
    assert len(estimator._bytes_per_token) == MODELS_REMEMBERED
    assert "kept" in estimator._bytes_per_token


def test_a_name_that_no_model_has_is_not_remembered() -> None:
    estimator = Estimator()
    estimator.learn(completion("a" * 400, model="m" * (LONGEST_MODEL_NAME + 1)), 400)
    assert len(estimator._bytes_per_token) == 0


@pytest.mark.parametrize(
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
    assert tokens_to_hold(payload, Estimator().prompt_tokens(payload), 100) == held


def test_embeddings_hold_their_prompts_alone() -> None:
    payload = read(Api.EMBEDDINGS, b'{"input":[[1,2],[3]]}')
    assert tokens_to_hold(payload, Estimator().prompt_tokens(payload), 512) == 3


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
@pytest.mark.parametrize("words", [1, 100, 5000])
async def test_a_tokenizer_counts_exactly(tokenizer_file: str, words: int) -> None:
    assert await TokenizerCounter(tokenizer_file).count("word " * words) == words


@pytest.mark.anyio
@pytest.mark.parametrize("words", [SAMPLED_ABOVE // 4, 60_000, 500_000])
async def test_long_text_is_sampled_within_a_few_percent(tokenizer_file: str, words: int) -> None:
    text = "".join("word " if number % 7 else "longerword " for number in range(words))
    assert await TokenizerCounter(tokenizer_file).count(text) == pytest.approx(words, rel=0.03)


@pytest.mark.anyio
async def test_the_samples_cover_the_whole_text(tokenizer_file: str) -> None:
    text = "word " * 50_000 + "x" * 250_000
    assert await TokenizerCounter(tokenizer_file).count(text) == pytest.approx(50_000, rel=0.15)


@pytest.mark.anyio
async def test_the_loop_runs_on_while_a_tokenizer_counts() -> None:
    class Slow(TokenizerCounter):
        def __init__(self) -> None:
            pass

        def _count(self, text: str) -> int:
            time.sleep(0.1)
            return len(text)

    counting = asyncio.ensure_future(Slow().count("abc"))
    beats = 0
    while not counting.done():
        await asyncio.sleep(0.005)
        beats += 1
    assert await counting == 3
    assert beats >= 5


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
    with pytest.raises(NoTokenizer, match=r"pip install 'admission-sidecar\[tokenizers\]'"):
        TokenizerCounter("tokenizer.json")


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json: not a tokenizer\.json"):
        TokenizerCounter(str(path))
