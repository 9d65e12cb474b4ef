"""What fuzzing has found, kept: each file is one input, its name says what it did, and for bytes what is answered."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
HTTP = sorted((FOLDER / "http").glob("*.bin"))
POLICIES = sorted((FOLDER / "policy").glob("*.yaml"))
"""The pool's file and, behind a line of `---`, a tenant's."""


def names(files: list[Path]) -> list[str]:
    """How a test shows them."""
    return [file.stem for file in files]
