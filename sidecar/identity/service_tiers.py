"""Names of tiers in `service_tier`, the field of OpenAI's, Anthropic's and Google's APIs: asked for, and granted.

The policy's `service_tiers` give values a tier, several of them the same one. `auto` leaves the choice to the server:
without a tier of its own it asks for nothing. A value that the policy does not name says nothing here either. It goes
to the engine as it came, which may refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.apis import Api

AUTO = "auto"
_STANDARD = {"standard": "standard", "standard_only": "standard", "batch": "batch"}
"""Anthropic's own values, as its answers write them; `priority` is OpenAI's, too."""

ServiceTiers = Sequence[tuple[str, int]]
"""Values and their levels, in the file's order."""
_decode = msgspec.json.Decoder(str | None).decode


def is_read(tiers: ServiceTiers, raw: bytes) -> bool:
    """True if a value has a meaning here, also that of no wish: the engine need not have it."""
    value = decoded(raw)
    return value in (None, AUTO) or value in dict(tiers)


def decoded(raw: bytes) -> object:
    """The value of a field; the text of one that cannot be decoded."""
    try:
        return _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return raw


def granted_name(tiers: ServiceTiers, api: Api, level: int, raw: bytes) -> str:
    """The granted tier, as an answer of `api` names it: as its client did where it got that, else by the file's order.

    A tier without a name has that of the next less important one; below all names, of the next more important one.
    """
    asked, is_messages = decoded(raw), api is Api.MESSAGES
    concrete = [(name, named) for name, named in tiers if name != AUTO]
    lower = [named for _, named in concrete if named >= level]
    level = min(lower) if lower else max(named for _, named in concrete)
    names = [name for name, named in concrete if named == level]
    own = [name for name in names if name == "priority" or (name in _STANDARD) == is_messages]
    name = asked if isinstance(asked, str) and asked in names else (*own, *names)[0]
    return _STANDARD.get(name, name) if is_messages else name
