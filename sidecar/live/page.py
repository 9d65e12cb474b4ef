"""The page as one document: markup, style and script are files beside this one, put together once; it loads nothing.

Its Content-Security-Policy names the very style and the very script by their hash, and allows a connection to its own
server: whatever a request's text might smuggle into the page does not run and reaches nobody.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _text("page.css"), _text("page.js")
PAGE = _text("page.html").replace("/*style*/", _STYLE).replace("/*script*/", _SCRIPT).encode()
POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
