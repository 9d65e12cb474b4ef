"""Extras: packages that only some features need, and how a message says that one is missing."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Command that installs an extra, for the end of a sentence.

    Always a path: no registry has this package, so whoever registers its name there would be installed.
    """
    return f"install the extra {extra} from the clone or the wheel: pip install './admission-sidecar[{extra}]'"
