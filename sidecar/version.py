"""The package's version, once; the commit that it was built from; and the layout of what it keeps in a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__version__ = "0.3.0"


def commit() -> str | None:
    """The commit of a release, as `.ci/release` notes it in the package; None where it was built otherwise."""
    try:
        return Path(__file__).with_name("commit.txt").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def store_layout(*, has_engines: bool, is_by_gain: bool) -> str:
    """Goes up when what the keys hold changes: replicas of two versions then keep two pools, and no broken one.

    The keys of several engines hold more, so a pool that gets its first engines is another one. Another order is
    another pool, too, and needs a restart. What the docs promise of it: docs/many-replicas.md.
    """
    if is_by_gain:
        return "gain-engines-4" if has_engines else "gain-4"
    return "engines-5" if has_engines else "9"


def version_document(*, has_engines: bool, is_by_gain: bool) -> Mapping[str, str | None]:
    """What runs here, in JSON types; the layout is that of a pool of such a policy."""
    layout = store_layout(has_engines=has_engines, is_by_gain=is_by_gain)
    return {"version": __version__, "commit": commit(), "store_layout": layout}


def version_line() -> str:
    """What `sidecar --version` prints."""
    layouts = ", ".join(store_layout(has_engines=i % 2 == 1, is_by_gain=i > 1) for i in range(4))
    built_from = (found := commit()) and f"commit {found}, "
    return f"admission-sidecar {__version__} ({built_from or ''}store layouts {layouts})"
