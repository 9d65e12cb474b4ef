"""Lua scripts for Redis and Valkey. That of the ledger is the files of `lua`, one after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

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


class Script(NamedTuple):
    """A script, and the name that the server knows it by."""

    source: str
    sha: str

    @classmethod
    def of(cls, source: str) -> Script:
        """The script with this text."""
        return cls(source, sha1(source.encode(), usedforsecurity=False).hexdigest())

    @classmethod
    def read(cls, package: str, name: str) -> Script:
        """The script in a file of a package."""
        return cls.of((files(package) / "lua" / f"{name}.lua").read_text(encoding="utf-8"))


class Library(NamedTuple):
    """A program as a function, for a server that has these, and as a script for one that has not.

    Its name has a digest of its text: replicas of two versions, each with its own, do not replace each other's.
    """

    function: str
    source: str
    script: Script


def texts() -> dict[str, str]:
    """The files, by name."""
    return {name: Script.read(__package__, name).source for name in FILES}


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


def library(parts: Mapping[str, str]) -> Library:
    """The program of these files."""
    text = joined(parts)
    script = Script.of(f"{text}return execute(KEYS, ARGV)\n")
    name = f"{FUNCTION}_{script.sha[:12]}"
    return Library(name, f"#!lua name={name}\n{text}redis.register_function('{name}', execute)\n", script)
