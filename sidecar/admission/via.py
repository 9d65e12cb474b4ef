"""Name of this process in the `via` header of what its proxy sends (RFC 9110, section 7.6.3); refusal of a loop.

Another sidecar after this one adds its own name, and is no loop.
"""

from __future__ import annotations

import secrets

from sidecar.errors import LoopDetected

PSEUDONYM = "admission-sidecar-"
"""The beginning of every sidecar's name in `via`."""
# Random, and not the host's name: replicas may share that, and clients of another sidecar may see it.
OWN_NAME = PSEUDONYM + secrets.token_hex(8)
OWN_VIA = f"1.1 {OWN_NAME}"
_OWN_NAME = OWN_NAME.encode()


def refuse_loop(via: bytes) -> None:
    """Raises LoopDetected where a request with this `via` was sent by this process."""
    if _OWN_NAME in via:
        raise LoopDetected(
            "this request came back to the sidecar that had forwarded it: the sidecar's --upstream leads to itself; "
            "the operator must give it the engine's address"
        )
