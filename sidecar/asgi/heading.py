"""What the head of an answer says of how its request was admitted."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.asgi.allowances import limits_headers
from sidecar.asgi.naming import wait_headers
from sidecar.asgi.understanding import Understood
from sidecar.pools import Lease


def tier_header(understood: Understood, tier_names: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Which tier it has."""
    return b"x-admission-tier", tier_names[understood.classification.level]


def admission_headers(
    understood: Understood, lease: Lease, tier_names: Sequence[bytes], preemptions: int
) -> list[tuple[bytes, bytes]]:
    """How it was admitted, and whatever of it is not as the client asked."""
    classification = understood.classification
    assert lease.grant is not None
    headers = [tier_header(understood, tier_names), *wait_headers(lease.grant)]
    if preemptions:
        headers.append((b"x-admission-preempted", b"%d" % preemptions))
    if classification.clamped_from is not None:
        headers.append((b"x-admission-clamped-from", tier_names[classification.clamped_from]))
    headers += limits_headers(understood, lease, tier_names)
    if classification.ignored:
        headers.append((b"x-admission-ignored", ", ".join(classification.ignored).encode("latin-1", "replace")))
    return headers
