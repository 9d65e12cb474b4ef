"""Names with dots, as a store sees them that nests them: Elasticsearch makes an object of each part."""

from __future__ import annotations

from collections.abc import Iterable


def refused_by_nesting(names: Iterable[str]) -> set[str]:
    """Those that have a value and are also the beginning of another name: such a store drops what has both."""
    all_names = {*names}
    return {name for name in all_names if any(other.startswith(f"{name}.") for other in all_names)}
