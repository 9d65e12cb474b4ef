"""The public keys of an issuer: fetched when they are needed, kept while the issuer is down.

A request starts a fetch where the keys are `REFRESH_S` old, where there are none, and where its token names a key that
is not there. Whatever clients send, two fetches begin at least `LEAST_INTERVAL_S` apart. Keys that were fetched once
stay in use until others come in their place.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sidecar.errors import IssuerUnavailable
from sidecar.policy.identity import is_address, public_keys, read_key_set

Checked = TypeVar("Checked")
REFRESH_S = 300.0
"""A key that the issuer has taken back is believed for so long at most, while the issuer answers."""
LEAST_INTERVAL_S = 5.0
"""Between the beginnings of two fetches: tokens with random key ids must not become requests to the issuer."""
FETCH_TIMEOUT_S = 4.0
LONGEST_WAIT_S = 3.0
"""The longest that a request waits for a fetch."""
MOST_KEYS = 100
LEAST_RSA_BITS = 2048
_USED_FOR_SIGNATURES = (None, "sig")

_log = logging.getLogger("sidecar.identity")


class KeysNeeded(IssuerUnavailable):
    """A token cannot be checked before a fetch that is under way has ended: `arrive`, and then try again."""

    def __init__(self, keys: IssuerKeys) -> None:
        super().__init__("the keys of the token's issuer are not here yet; try again", retry_after_s=1)
        self._keys = keys

    async def arrive(self) -> None:
        """Returns when the fetch has ended, or after `LONGEST_WAIT_S`."""
        await self._keys.fetched()


async def with_keys(check: Callable[[], Checked]) -> Checked:
    """Result of `check`, after the keys of a token's issuer have come where it needs them. Raises as it does."""
    try:
        return check()
    except KeysNeeded as needed:
        await needed.arrive()
        return check()


class IssuerKeys:
    """The keys at one address, or in one file. `clock` is monotonic, in seconds.

    `fetches` counts them, with those that failed, and `changes` how often other keys have come.
    """

    def __init__(self, place: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self.fetches = self.changes = 0
        self.failure: str | None = None
        self._clock = clock
        self._due_s = float("-inf")
        self._next_s = float("-inf")
        self._entries: list[Mapping[str, object]] = []
        self._keys: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._key_page: Callable[[str, float], Awaitable[bytes]] | None = None
        if is_address(place):
            from sidecar.identity.key_page import key_page  # with the policy: a request would wait for the import

            self._key_page = key_page

    def refresh_if_due(self) -> None:
        """Starts a fetch where the keys are old. The old ones stay in use meanwhile."""
        if self._clock() >= self._due_s:
            self._start()

    def key(self, key_id: str | None) -> Any:
        """The key that a token names, or the only one. None where it is not the issuer's.

        Raises KeysNeeded where a fetch might bring it, IssuerUnavailable where the last fetch failed.
        """
        self.refresh_if_due()
        found = self._find(key_id)
        if found is not None:
            return found
        if self._keys and key_id is None:
            return None
        if not self._may_wait():
            if self.failure is not None:
                raise IssuerUnavailable(
                    "the keys of the token's issuer could not be fetched, so it cannot be checked; try again",
                    retry_after_s=LEAST_INTERVAL_S,
                )
            return None
        raise KeysNeeded(self)

    async def fetched(self) -> None:
        """Returns when the fetch that is under way has ended, or after `LONGEST_WAIT_S`."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=LONGEST_WAIT_S)

    async def fetch(self) -> None:
        """Fetches the keys now. Does not raise: `failure` says what went wrong."""
        self.fetches += 1
        self._next_s = self._clock() + LEAST_INTERVAL_S
        try:
            entries = public_keys(await self._read())[:MOST_KEYS]
            keys = _import_keys(entries)
            if not keys:
                raise ValueError("has no key that can check a signature")
        except asyncio.TimeoutError:
            self._failed(f"no answer within {FETCH_TIMEOUT_S:g} s")
            return
        except (OSError, ValueError) as error:
            self._failed(str(error) or type(error).__name__)
            return
        self.failure, self._due_s = None, self._clock() + REFRESH_S
        if entries != self._entries:
            self._entries, self._keys = entries, keys
            self.changes += 1
            _log.info("%d keys of the tokens' issuer from %s", len(keys), self.place, extra={"event": "issuer_keys"})

    def _find(self, key_id: str | None) -> Any:
        if key_id is not None:
            return self._keys.get(key_id)
        return next(iter(self._keys.values())) if len(self._keys) == 1 else None

    def _may_wait(self) -> bool:
        """True if a fetch is under way, which may have been started just now."""
        if self._task is None or self._task.done():
            self._start()
        return self._task is not None and not self._task.done()

    def _start(self) -> None:
        now_s = self._clock()
        if now_s < self._next_s or (self._task is not None and not self._task.done()):
            return
        self._next_s = now_s + LEAST_INTERVAL_S
        self._task = asyncio.get_running_loop().create_task(self.fetch())

    async def _read(self) -> bytes:
        if self._key_page is None:
            return await asyncio.to_thread(read_key_set, Path(self.place))
        return await self._key_page(self.place, FETCH_TIMEOUT_S)

    def problem(self) -> str | None:
        """Failure of the last fetch, and its effect; None where nothing did."""
        if self.failure is None:
            return None
        kept = "the old ones stay in use" if self._keys else "no token can be checked"
        place = self.place.partition("?")[0]  # everyone may read it
        return f"the keys of the tokens' issuer could not be fetched from {place}: {self.failure}; {kept}"

    def _failed(self, reason: str) -> None:
        before, self.failure = self.failure, reason
        if before != reason:
            _log.warning("%s", self.problem(), extra={"event": "issuer_unavailable"})
        self._due_s = self._clock() + LEAST_INTERVAL_S


def _import_keys(entries: list[Mapping[str, object]]) -> dict[str, Any]:
    """The keys that can check a signature, by their ids; one without an id has its place in the list instead."""
    found: dict[str, Any] = {}
    for place, entry in enumerate(entries):
        key = _key(entry)
        if key is not None:
            key_id = entry.get("kid")
            found[key_id if isinstance(key_id, str) else f"\0{place}"] = key
    return found


def _key(entry: Mapping[str, object]) -> Any:
    """One key; None for one that is not for signatures, is too weak, or is of a kind that is not known here."""
    from joserfc import jwk
    from joserfc.errors import JoseError

    operations = entry.get("key_ops")
    is_other = entry.get("use") not in _USED_FOR_SIGNATURES or (
        isinstance(operations, list) and "verify" not in operations
    )
    if is_other:
        return None
    public = {name: value for name, value in entry.items() if name in _PUBLIC_MEMBERS}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a weak key, which is left out here
            key: Any = jwk.import_key(dict(public))  # type: ignore[arg-type, unused-ignore]
        is_weak = entry["kty"] == "RSA" and key.public_key.key_size < LEAST_RSA_BITS
    except (JoseError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return None if is_weak else key


_PUBLIC_MEMBERS = frozenset({"kty", "n", "e", "crv", "x", "y", "kid", "alg"})
"""Without a private part that an issuer has published by mistake."""
