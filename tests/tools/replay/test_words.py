"""Prompts of an exact length, counted by real tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sidecar.lengths.token_estimates import NoTokenizer
from sidecar.tools.replay.prompts import CANDIDATES, Words, learn, new_words
from sidecar.tools.replay.server import AskedServer
from tests.support.serving import serving
from tests.tools.emulator.emulated import VLLM, emulated

pytestmark = pytest.mark.anyio
TEMPLATE = "<|user|>\n{}<|end|>\n<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE, as the engines' models have them, that knows some of the words as one token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    corpus = [" ".join(rng.choices(CANDIDATES[::2], k=30)) for _ in range(300)]
    special = ["<|user|>", "<|end|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return made


@asynccontextmanager
async def engine(tokenizer: Tokenizer, *, counts_messages: bool) -> AsyncIterator[AskedServer]:
    """A server with `/tokenize`, as vLLM's (which counts messages too) or as SGLang's."""

    async def tokenize(request: Request) -> Response:
        body: dict[str, Any] = json.loads(await request.body())
        text = body.get("prompt")
        if text is None and counts_messages:
            text = TEMPLATE.format(body["messages"][0]["content"])
        if text is None:
            return JSONResponse({"object": "error", "message": "prompt: Field required"}, 400)
        ids = tokenizer.encode(text).ids
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": 512})

    app = Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])
    async with serving(app, lifespan="off") as served, AskedServer(served.url) as server:
        yield server


@pytest.mark.parametrize("tokens", [20, 21, 64, 300, 1000])
async def test_a_chat_prompt_has_with_its_template_the_tokens_that_were_asked_for(
    tokenizer: Tokenizer, tokens: int
) -> None:
    async with engine(tokenizer, counts_messages=True) as server:
        words = await new_words(server, "m", None, chat=True)
    assert (words.is_exact, words.source) == (True, "the engine's own tokenizer")
    for seed in range(5):
        text = words.text(tokens, random.Random(seed))
        assert len(tokenizer.encode(TEMPLATE.format(text)).ids) == tokens


@pytest.mark.parametrize("chat", [True, False])
async def test_where_messages_cannot_be_counted_the_text_alone_is_exact(tokenizer: Tokenizer, chat: bool) -> None:
    async with engine(tokenizer, counts_messages=False) as server:
        words = await new_words(server, "m", None, chat=chat)
    assert words.source.endswith("; its chat template comes on top" if chat else "the engine's own tokenizer")
    assert len(tokenizer.encode(words.text(77, random.Random(1))).ids) == 77


async def test_a_tokenizer_file_goes_before_the_engine(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    async with AskedServer("http://127.0.0.1:9") as no_server:
        words = await new_words(no_server, "m", str(file), chat=False)
        assert words.source == str(file)
        assert len(tokenizer.encode(words.text(123, random.Random(1))).ids) == 123
        with pytest.raises(NoTokenizer, match=r"not a tokenizer\.json"):
            await new_words(no_server, "m", __file__, chat=False)


async def test_without_a_tokenizer_a_token_is_four_bytes() -> None:
    async with emulated(VLLM) as client, AskedServer(client.url) as server:
        words = await new_words(server, "m", None, chat=True)
    assert (words.is_exact, words.source) == (False, "4 bytes a token (no tokenizer at hand)")
    assert len(words.text(50, random.Random(1)).encode()) == 200


async def test_a_tokenizer_that_joins_words_or_cuts_them_all_is_not_trusted() -> None:
    async def by_characters(text: str) -> int:
        return len(text)

    async def joining(text: str) -> int:
        pieces = text.split()
        return len(pieces) if len(set(pieces)) == 1 else len(pieces) // 2

    assert "no usual words of one token" in (await learn(by_characters, by_characters, "x") or Words()).source
    assert "joins words" in (await learn(joining, joining, "x") or Words()).source


@pytest.mark.parametrize("words", [Words(), Words(tuple(CANDIDATES[:24]), 14, "a tokenizer")])
def test_equal_blocks_are_equal_text_and_other_prompts_share_nothing(words: Words) -> None:
    first = words.text(1500, random.Random(1), ["a", "b"], 512)
    second = words.text(1300, random.Random(2), ["a", "c"], 512)
    other = words.text(1500, random.Random(3))
    assert _shared_words(first, second) in range(512, 530)
    assert _shared_words(first, other) < 8
    assert words.text(600, random.Random(1), ["a", "b"], 512) == words.text(600, random.Random(9), ["a", "b"], 512)


def _shared_words(left: str, right: str) -> int:
    pairs = zip(left.split(), right.split(), strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(left))
