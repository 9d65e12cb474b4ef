"""Who counts the tokens of prompts: a `tokenizer.json`, or the engine's own `/tokenize`; or nobody."""

from __future__ import annotations

from sidecar.replay.engine import Server
from sidecar.replay.words import Count, Words, learn
from sidecar.tokens import TokenizerCounter


async def words_of(server: Server, model: str, tokenizer: str | None, *, chat: bool) -> Words:
    """The vocabulary for prompts of exact length. Raises NoTokenizer for a file that was named and cannot be used."""
    if tokenizer is not None:
        counter = TokenizerCounter(tokenizer)

        async def by_file(text: str) -> int | None:
            return await counter.count(text)

        template = "; the engine's chat template comes on top" if chat else ""
        return await learn(by_file, by_file, f"{tokenizer}{template}") or Words()

    async def by_engine(text: str) -> int | None:
        return await server.count({"model": model, "prompt": text})

    async def whole(text: str) -> int | None:
        return await server.count({"model": model, "messages": [{"role": "user", "content": text}]})

    has_template_count = chat and await whole("hello") is not None
    count_prompt: Count = whole if has_template_count else by_engine
    around = "" if has_template_count or not chat else "; its chat template comes on top"
    return await learn(by_engine, count_prompt, f"the engine's own tokenizer{around}") or Words()
