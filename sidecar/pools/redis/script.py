"""The text of the ledger's script for Redis and Valkey: the files of `lua`, one after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha1
from importlib.resources import files

FILES = (
    "state", "root", "limits", "figures", "queue", "engines", "scheduler", "preemption", "members", "calls", "write",
    "ledger",
)  # fmt: skip
FUNCTION = "admission_ledger"

_NAMES = r"[A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*"
_PIECE = re.compile(
    rf"^local (?P<names>{_NAMES}) = (?P<values>\d+(?:, \d+)*)(?= *(?:--.*)?$)"
    r"|(?P<comment> *--[^\n]*)|'(?:\\.|[^'\\\n])*'|(?P<name>[A-Z][A-Z0-9_]*)\b|\w+",
    re.MULTILINE,
)
"""A declaration of constants, a comment, a text, the name of a constant, or another word."""


def texts() -> dict[str, str]:
    """The files, by name."""
    return {name: (files(__package__) / "lua" / f"{name}.lua").read_text(encoding="utf-8") for name in FILES}


def joined(parts: Mapping[str, str]) -> str:
    """One text, with numbers in place of its constants: a script may have 200 locals.

    The functions are in one around them: a script makes them at each call, and finds what they share the faster so.
    """
    constants: dict[str, str] = {}

    def replace(piece: re.Match[str]) -> str:
        if piece["names"]:
            constants.update(zip(piece["names"].split(", "), piece["values"].split(", "), strict=True))
            return ""
        return "" if piece["comment"] else constants.get(piece["name"] or "", piece[0])

    shared, *functions = (_PIECE.sub(replace, parts[name]) for name in FILES)
    return f"{shared}local execute = (function()\n{''.join(functions)}return execute\nend)()\n"


def script(parts: Mapping[str, str]) -> str:
    """For EVALSHA, where the server has no functions."""
    return joined(parts) + "return execute(KEYS, ARGV)\n"


def library(parts: Mapping[str, str]) -> tuple[str, str]:
    """The name of the function, and the text for FUNCTION LOAD. The name tells texts apart: replicas of two versions
    have one each.
    """
    text = joined(parts)
    name = f"{FUNCTION}_{sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]}"
    return name, f"#!lua name={name}\n{text}redis.register_function('{name}', execute)\n"
