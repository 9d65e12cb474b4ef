"""Names of tiers in `service_tier`, the field of OpenAI's, Anthropic's and Google's APIs: asked for, and granted.

The policy's `service_tiers` give values a tier, several of them the same one. `auto` leaves the choice to the server:
without a tier of its own it asks for nothing. A value that the policy does not name asks for nothing either. It goes to
the engine as it came, which may refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.apis import Api

_AUTO = "auto"
_STANDARD = {"standard": "standard", "standard_only": "standard", "batch": "batch"}
"""Anthropic's values, as its answers write them. `priority` is OpenAI's, too."""
_decode = msgspec.json.Decoder(str | None).decode


class ServiceTiers:
    """The values of one policy and their levels, in the file's order. `raw` is the body's field, undecoded."""

    def __init__(self, pairs: Sequence[tuple[str, int]]) -> None:
        self._levels: dict[object, int] = dict(pairs)
        self._named = [(name, level) for name, level in pairs if name != _AUTO]

    def level(self, raw: bytes) -> int | None:
        """The level that a value asks for, None for none."""
        return self._levels.get(_value(raw))

    def is_silent(self, raw: bytes) -> bool:
        """True if a value asks for nothing, and is known to do so."""
        value = _value(raw)
        return value is None or (value == _AUTO and value not in self._levels)

    def is_read(self, raw: bytes) -> bool:
        """True if a value has a meaning here: the engine need not have it."""
        return self.is_silent(raw) or self.level(raw) is not None

    def granted_name(self, api: Api, level: int, raw: bytes) -> str:
        """The granted tier, as an answer of `api` names it: as its client did, or else by the file's order.

        A tier without a name has that of the next less important one; below all names, of the last.
        """
        asked, is_messages = _value(raw), api is Api.MESSAGES
        lower = [named for _, named in self._named if named >= level]
        level = min(lower) if lower else max(named for _, named in self._named)
        names = [name for name, named in self._named if named == level]
        own = [name for name in names if name == "priority" or (name in _STANDARD) == is_messages]
        name = next((name for name in names if name == asked), (*own, *names)[0])
        return _STANDARD.get(name, name) if is_messages else name


def _value(raw: bytes) -> object:
    """The value of a field; the text of one that is no string, or cannot be decoded."""
    try:
        return _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return raw
