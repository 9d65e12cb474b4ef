"""The token of the admin pages: the door asks for it, and `sidecar top` and `sidecar explain` send it."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.secret import FILE_SUFFIX, secret_for_header

TOKEN_VARIABLE = "SIDECAR_ADMIN_TOKEN"
SHORTEST_TOKEN = 16
"""Characters. Nothing at the door slows down who guesses; 16 random ones are beyond guessing."""
HOW_TO_SET = f"set {TOKEN_VARIABLE}, or {TOKEN_VARIABLE}{FILE_SUFFIX} to a file that holds it"


def admin_token(environment: Mapping[str, str]) -> str | None:
    """The token, None where there is none. Raises ValueError for what cannot be one; it is never shown."""
    token = secret_for_header(environment, TOKEN_VARIABLE)
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ValueError(
            f"{TOKEN_VARIABLE}: shorter than {SHORTEST_TOKEN} characters; `sidecar keys new` prints a key that will do"
        )
    return token


def token_header(environment: Mapping[str, str]) -> dict[str, str]:
    """The header that shows the token, none where there is no token. Raises ValueError as `admin_token`."""
    token = admin_token(environment)
    return {} if token is None else {"Authorization": f"Bearer {token}"}
