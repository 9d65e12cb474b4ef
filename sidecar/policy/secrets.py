"""Secrets of the environment: in a variable, or in the file that the variable with the suffix `_FILE` names.

Docker and Kubernetes mount secrets as files. A file, unlike a variable, does not show in `docker inspect` or in a child
process. An error names the variable and what is wrong, and never repeats any part of the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

FILE_SUFFIX = "_FILE"
_LARGEST_BYTES = 64 * 1024
"""A certificate chain given by mistake is still read, and refused for what it is; a disk image is not."""
_IN_A_HEADER = re.compile(r"[!-~]+")


def secret(environment: Mapping[str, str], name: str) -> str | None:
    """The secret called `name`, None where there is none. Raises ValueError where it is given twice, or unreadable."""
    written, path = environment.get(name), environment.get(name + FILE_SUFFIX)
    if not path:
        return written or None
    if written:
        raise ValueError(f"{name} and {name}{FILE_SUFFIX} are both set; unset one of them")
    return _content(Path(path), name + FILE_SUFFIX)


def secret_for_header(environment: Mapping[str, str], name: str) -> str | None:
    """As `secret`, of what travels in a header. Raises ValueError also for what cannot."""
    found = secret(environment, name)
    return None if found is None else _fit_for_a_header(found, name)


def key_in_file(path: str, option: str) -> str:
    """The key in a file that an option of the command line names. Raises ValueError where there is none."""
    return _fit_for_a_header(_content(Path(path), option), option)


def _fit_for_a_header(found: str, name: str) -> str:
    if not _IN_A_HEADER.fullmatch(found):
        raise ValueError(f"{name}: contains a space, a line end or a character beyond ASCII; write the key alone")
    return found


def _content(path: Path, name: str) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "its name is not valid"
        raise ValueError(
            f"{name}: {str(path)!r} cannot be read ({reason}); name a file that this user may read"
        ) from None
    if len(content) > _LARGEST_BYTES:
        raise ValueError(f"{name}: {str(path)!r} is larger than {_LARGEST_BYTES} bytes; name the secret's own file")
    try:
        found = content.decode().rstrip("\r\n")  # editors and `echo` end a file with one
    except UnicodeDecodeError:
        raise ValueError(f"{name}: {str(path)!r} is not text; name the secret's own file") from None
    if not found:
        raise ValueError(f"{name}: {str(path)!r} is empty; write the secret into it")
    return found


ENGINE_KEY_VARIABLE = "SIDECAR_ENGINE_KEY"
"""The engine's own API key: for its pages, which `capacity: {from: engine}` reads, and for every admitted request."""
TOKEN_VARIABLE = "SIDECAR_ADMIN_TOKEN"
SHORTEST_TOKEN = 16
"""Characters. Nothing slows down guesses; 16 random characters cannot be guessed."""
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
