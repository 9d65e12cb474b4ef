"""The hashes of a prompt's blocks: what is the same prompt, and what only looks so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.tools.emulator.prompt_blocks import Piece, PromptChain, read_chains
from sidecar.tools.step_model.kv_cache import BlockHash

TEXT = "one two three four five six seven eight nine ten eleven twelve " * 3


def hashes(body: dict[str, Any], api: Api = Api.CHAT, model: str = "m", size: int = 4) -> list[BlockHash]:
    (chain,) = read_chains(api, body, model, size)
    return chain.hashes


def chat(*turns: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


def common(one: list[BlockHash], two: list[BlockHash]) -> int:
    same = [a == b for a, b in zip(one, two, strict=False)]
    assert same == sorted(same, reverse=True), "a block was found after one that was not"
    return sum(same)


def test_the_same_prompt_has_the_same_blocks_and_only_full_ones() -> None:
    assert hashes(chat(("user", TEXT))) == hashes(chat(("user", TEXT)))
    assert len(hashes(chat(("user", "x" * 31)))) == 1
    assert len(hashes(chat(("user", "x" * 32)))) == 2
    assert len(hashes(chat(("user", TEXT)), size=16)) == len(TEXT) // 64


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(1, 4))
def test_two_prompts_share_exactly_the_blocks_before_their_first_difference(one: bytes, two: bytes, size: int) -> None:
    chains = [PromptChain(b"root", [Piece(b"text", data)], size) for data in (one, two)]
    equal = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert common(chains[0].hashes, chains[1].hashes) == equal // (4 * size)
    assert len(chains[0].hashes) == len(one) // (4 * size)


@pytest.mark.parametrize(
    "other",
    [
        chat(("system", TEXT)),
        chat(("user", TEXT), cache_salt="tenant"),
        chat(("user", TEXT), tools=[{"type": "function"}]),
        chat(("system", ""), ("user", TEXT)),
    ],
)
def test_another_role_salt_or_tool_is_another_prompt_from_its_first_block_on(other: dict[str, Any]) -> None:
    assert common(hashes(chat(("user", TEXT))), hashes(other)) == 0


def test_another_model_name_is_another_adapter_and_shares_nothing() -> None:
    assert common(hashes(chat(("user", TEXT))), hashes(chat(("user", TEXT)), model="lora")) == 0


def test_the_same_text_cut_into_other_turns_is_shared_up_to_the_cut() -> None:
    whole, cut = hashes(chat(("user", TEXT))), hashes(chat(("user", TEXT[:64]), ("user", TEXT[64:])))
    assert len(whole) == len(cut)
    assert common(whole, cut) == 4


def test_text_and_token_ids_with_the_same_bytes_are_different_prompts() -> None:
    ids = hashes({"prompt": [0x20202020] * 8}, Api.COMPLETIONS)
    assert len(ids) == 2
    assert common(ids, hashes({"prompt": " " * 32}, Api.COMPLETIONS)) == 0
    assert ids == hashes({"prompt": [0x20202020] * 8}, Api.COMPLETIONS)


def test_every_prompt_of_a_list_has_its_chain_and_token_ids_of_any_size_count() -> None:
    chains = read_chains(Api.COMPLETIONS, {"prompt": ["a" * 16, "b" * 32]}, "m", 4)
    assert [len(chain.hashes) for chain in chains] == [1, 2]
    chains = read_chains(Api.COMPLETIONS, {"prompt": [[1] * 4, [2**40, -1, 0, 5]]}, "m", 4)
    assert [len(chain.hashes) for chain in chains] == [1, 1]
    assert read_chains(Api.EMBEDDINGS, {"input": "a" * 64}, "m", 4) == ()


def test_the_next_turn_begins_with_the_prompt_and_the_output() -> None:
    (chain,) = read_chains(Api.CHAT, chat(("user", TEXT)), "m", 4)
    said = chain.with_output(b" the quick brown fox jumps")
    following = hashes(chat(("user", TEXT), ("assistant", " the quick brown fox jumps"), ("user", "and then?")))
    assert common(list(said), following) == len(said) > len(chain.hashes)
    assert chain.with_output(b" the quick brown fox jumps") == said


def test_images_and_odd_values_do_no_harm() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "y" * 16}, 7, None]
    assert len(hashes(chat(("user", parts)))) == 1
    assert hashes({"messages": ["no mapping", None]}) == []
    assert len(hashes({"input": "\udcff" * 8}, Api.RESPONSES)) == 1
