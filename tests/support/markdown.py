"""Markdown as code hosts show it: the headings one can link to, and the links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^()\s>]+)>?(?: \"[^\"]*\")?\)")
_SOURCE = re.compile(r"<(?:img|source|a)\b[^>]*?\b(?:src|srcset|href)=\"([^\"]+)\"")
_TARGET = re.compile(r"\]\([^)]*\)")


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return _FENCE.sub("", text)


def anchors(markdown: Path) -> list[str]:
    """The anchors of a page's headings, in order; of those that read alike the second ends in -1, and so on."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    for heading in _HEADING.findall(prose(markdown.read_text(encoding="utf-8"))):
        anchor = re.sub(r"[^\w\- ]", "", _TARGET.sub("]", heading)).strip().lower().replace(" ", "-")
        found.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def section(markdown: Path, heading: str) -> str:
    """The text below a heading, without its smaller ones' sections."""
    text = markdown.read_text(encoding="utf-8")
    return re.split(r"^#{1,6} ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table(markdown: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, each a list of its cells as written."""
    lines = (line for line in section(markdown, heading).splitlines() if line.startswith("|"))
    _, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return rows


def links(markdown: Path) -> list[str]:
    """Where its links and pictures lead, as written. Links inside of a link's text, as a picture's, count too."""
    text = _CODE.sub("", prose(markdown.read_text(encoding="utf-8")))
    inside = [link for words in re.findall(r"\[(!\[[^\]]*\]\([^)]*\))\]", text) for link in _LINK.findall(words)]
    return [*_LINK.findall(text), *inside, *_SOURCE.findall(text)]
