"""What commands that print figures have in common: the same figures as JSON, in a file or on standard output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

STANDARD_OUTPUT = "-"


def write_json(target: str | None, figures: Any) -> bool:
    """Writes records, mappings and lists as JSON to `target`; nothing for None. False where it cannot be written."""
    if target is None:
        return True
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return True
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{target}: cannot be written ({error.strerror})", file=sys.stderr)
        return False
    return True
