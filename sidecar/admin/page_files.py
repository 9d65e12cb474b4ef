"""Files of the admin port's HTML pages, and the headers that those pages are sent with."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files


def read_text(name: str) -> str:
    """A file beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def headers(style: str, script: str | None = None) -> Mapping[str, str]:
    """Headers of a page with this style and this script, which may load and run nothing else.

    A page without a script connects to nothing.
    """
    scripts = "" if script is None else f"script-src {_hash(script)}; connect-src 'self'; "
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; {scripts}img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
