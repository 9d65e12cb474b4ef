"""Tokenizer with the emulated engines' own tokens: four bytes each, for routers that tokenize prompts themselves.

The words of the replay's prompts (`sidecar.tools.replay.prompts`) are one token each, because they are four bytes long.
Other text falls back to a token for each byte, so that its prompts would be four times as long: use it for prompts of
such words only. The chat template writes the messages' text and nothing else, as the engines count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sidecar.tools.replay.prompts import CANDIDATES

LONGEST_WORD = 3
"""With at least one space after it, to four bytes."""
WORDS = tuple(f"{word:<4}" for word in CANDIDATES if len(word) <= LONGEST_WORD)
END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONTEXT_TOKENS = 131_072


def write_model(folder: Path) -> Path:
    """A model's folder as Hugging Face lays it out, without weights. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_document()
    end = tokenizer["added_tokens"][0]["id"]
    special = {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": END}
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            **special,
        },
        "special_tokens_map.json": special,
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": end + 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": CONTEXT_TOKENS,
            "bos_token_id": end,
            "eos_token_id": end,
        },
    }
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def tokenizer_document() -> dict[str, Any]:
    """`tokenizer.json`: the 256 bytes, then the words, found whole before anything is merged (`ignore_merges`)."""
    letters = _byte_letters()
    tokens = [letters[byte] for byte in range(256)]
    tokens += ["".join(letters[byte] for byte in word.encode()) for word in WORDS]
    end = {"id": len(tokens), "content": END, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    fours = {"type": "Split", "pattern": {"Regex": "[\\s\\S]{4}"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [fours, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: number for number, token in enumerate([*tokens, END])},
            "merges": [],
        },
    }


def _byte_letters() -> dict[int, str]:
    """A printable letter for each byte: GPT-2's `bytes_to_unicode`, which every byte-level tokenizer uses."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + number) for number, byte in enumerate(others)}
