"""The text of the admission script, put together from the files in `lua`.

A call of the script makes all of its functions anew, and each function that uses a local of the script costs more. So a
kind of pool has a script of its own, and the constants of the files become numbers in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from sidecar.pools.redis.protocol import TIER_FIELDS

_NAME = "[A-Z][A-Z0-9_]*"
_NAMES = rf"{_NAME}(?:,\s*{_NAME})*"
_PIECE = re.compile(
    rf"^local (?P<names>{_NAMES}) = (?P<values>[\w +,]+?)(?= *(?:--.*)?$)"
    r"|--[^\n]*|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
    rf"|(?P<name>{_NAME})\b|\w+",
    re.MULTILINE,
)
"""A declaration of constants, a comment, a text, the name of a constant, or another word."""


@cache
def source(*, has_engines: bool = False, is_by_gain: bool = False) -> str:
    """The script of a pool: of several engines, or one that orders by gain, or both, or none of these."""
    return folded(joined(has_engines=has_engines, is_by_gain=is_by_gain))


def joined(
    texts: Mapping[str, str] = MappingProxyType({}), *, has_engines: bool = False, is_by_gain: bool = False
) -> str:
    """`lua/admission.lua` with its included files. `texts` replaces files, by name.

    The lines that begin with `-- with engines:` are only for pools of several engines, and so on. Those with `neither`
    are for pools of one engine that order by level.
    """

    def text_of(name: str) -> str:
        return texts.get(name) or (files(__package__) / "lua" / name).read_text(encoding="utf-8").rstrip("\n")

    names = ", ".join([*(name.upper() for name in TIER_FIELDS), "TIER_FIELDS"])
    positions = ", ".join(map(str, [*range(1, len(TIER_FIELDS) + 1), len(TIER_FIELDS)]))
    whole = text_of("admission.lua")
    kinds = {
        "engines": has_engines,
        "gain": is_by_gain,
        "gain and engines": has_engines and is_by_gain,
        "neither": not has_engines and not is_by_gain,
    }
    for kind, is_wanted in kinds.items():
        if is_wanted:
            whole = re.sub(rf"^-- with {kind}: include", "-- include", whole, flags=re.MULTILINE)
            whole = re.sub(rf"^-- with {kind}: ", "", whole, flags=re.MULTILINE)
        else:
            whole = re.sub(rf"^-- with {kind}: .*\n\n?", "", whole, flags=re.MULTILINE)
    for _ in range(2):  # an included file may include others
        whole = re.sub(r"^-- include (\S+)$", lambda line: text_of(line[1]), whole, flags=re.MULTILINE)
    return f"local {names} = {positions}\n\n{whole}\n"


def folded(text: str) -> str:
    """A script with numbers in place of its constants. Its lines keep their numbers.

    A constant is a name in capitals that is declared as a whole number, or as a sum of numbers and of constants before
    it. It may be declared once more; it is never assigned.
    """
    constants: dict[str, str] = {}

    def value(written: str) -> str:
        return str(sum(int(constants.get(part.strip(), part)) for part in written.split("+")))

    def replace(piece: re.Match[str]) -> str:
        if piece["names"]:
            names, values = re.split(r",\s*", piece["names"]), piece["values"].split(",")
            constants.update(zip(names, map(value, values), strict=True))
            return "\n" * piece[0].count("\n")
        return constants.get(piece["name"] or "", piece[0])

    return _PIECE.sub(replace, text)
