"""The package's version, once; the commit that it was built from; and the layout of what it keeps in a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__version__ = "0.4.0"


def commit() -> str | None:
    """The commit of a release, as `.ci/release` notes it in the package; None where it was built otherwise."""
    try:
        return Path(__file__).with_name("commit.txt").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


STORE_LAYOUT = 101
"""Goes up when what a pool's keys hold changes: two layouts never admit together. The docs' promise of it:
docs/many-replicas.md."""


def version_document() -> Mapping[str, str | None]:
    """The versions that run here, in JSON types."""
    return {"version": __version__, "commit": commit(), "store_layout": str(STORE_LAYOUT)}


def version_line() -> str:
    """Line that `sidecar --version` prints."""
    built_from = (found := commit()) and f"commit {found}, "
    return f"admission-sidecar {__version__} ({built_from or ''}store layout {STORE_LAYOUT})"
