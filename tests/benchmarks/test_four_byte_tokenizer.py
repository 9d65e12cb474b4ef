"""The tokenizer for routers that tokenize prompts themselves: as many tokens as the emulated engines count."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.peers.four_byte_tokenizer import END, write_model
from sidecar.apis import Api
from sidecar.tools.emulator.request import read_ask
from sidecar.tools.replay.prompts import Words
from tests.support.each import each

pytestmark = pytest.mark.long

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(name="tokenizer", scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder: Path = write_model(tmp_path_factory.mktemp("model") / "made")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("tokens", [1, 2, 17, 5_000])
def test_a_replays_prompt_has_the_tokens_that_the_engine_counts(tokenizer: tokenizers.Tokenizer, tokens: int) -> None:
    text = Words().text(tokens, random.Random(tokens))
    counted = read_ask(Api.COMPLETIONS, {"prompt": text}, "m").prompt_tokens
    found = tokenizer.encode(text)
    assert len(found.ids) == counted == tokens
    assert tokenizer.decode(found.ids) == text
    assert len(set(found.ids)) > min(tokens, 20) // 2


@each("text", ["hello", "the other four", "ünï€𝄞 the of  ", "\n\t\0", ""])
def test_other_text_survives(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_end_token_is_its_own(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizer.encode(END).ids == [tokenizer.token_to_id(END)] == [tokenizer.get_vocab_size() - 1]
