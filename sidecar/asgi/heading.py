"""What the head of an answer says of how its request was admitted."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.asgi.allowances import limits_headers
from sidecar.asgi.naming import wait_headers
from sidecar.asgi.understanding import Understood
from sidecar.pools import Lease


def early_headers(
    understood: Understood, lease: Lease, tier_names: Sequence[bytes], request_id: str
) -> list[tuple[bytes, bytes]]:
    """What is known of a request while it still waits."""
    named = (b"x-request-id", request_id.encode("ascii"))
    return [named, *_tier_headers(understood, tier_names), *limits_headers(understood, lease, tier_names)]


def admission_headers(
    understood: Understood, lease: Lease, tier_names: Sequence[bytes], preemptions: int
) -> list[tuple[bytes, bytes]]:
    """How it was admitted, and whatever of it is not as the client asked."""
    assert lease.grant is not None
    headers = [*_tier_headers(understood, tier_names), *wait_headers(lease.grant)]
    if preemptions:
        headers.append((b"x-admission-preempted", b"%d" % preemptions))
    headers += limits_headers(understood, lease, tier_names)
    return headers


def _tier_headers(understood: Understood, tier_names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Which tier it has, and what of its asking did not count."""
    classification = understood.classification
    headers = [(b"x-admission-tier", tier_names[classification.level])]
    if classification.clamped_from is not None:
        headers.append((b"x-admission-clamped-from", tier_names[classification.clamped_from]))
    if classification.ignored:
        headers.append((b"x-admission-ignored", ", ".join(classification.ignored).encode("latin-1", "replace")))
    return headers
