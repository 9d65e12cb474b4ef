"""The ledger in a store: the same calls as `Ledger`, answered by its script."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.pools.calls import Call, Reply, WakeUp
from sidecar.pools.ledger import Ledger, LedgerState
from sidecar.pools.redis import script

ROOT = "ledger:{pool}"
OLD_POOLS = [f"admission:{layout}:{{pool}}" for layout in ("9", "engines-5", "gain-4", "gain-engines-4")]


Edit = tuple[str, str, str]


class StoredLedger:
    """`client` is a client of a server, or of fakeredis. By EVALSHA, or `as_function`.

    `is_patient`: a store without calls is not silent, and replicas do not die. `edits`: of a file, a text that another
    one replaces.
    """

    def __init__(
        self, client: Any, *, as_function: bool = False, is_patient: bool = False, edits: Iterable[Edit] = ()
    ) -> None:
        self.client, self.as_function = client, as_function
        parts = script.texts()
        for name, old, new in edits:
            assert parts[name].count(old) == 1, (name, old)
            parts[name] = parts[name].replace(old, new)
        if is_patient:
            for name in ("LOST_US", "DEAD_US"):
                parts["state"], count = re.subn(rf"(local {name} = )\d+", rf"\g<1>{10**15}", parts["state"])
                assert count == 1
        self.keys = [ROOT, *OLD_POOLS]
        self._library = script.library(parts)
        self.function = self._library.function
        self.load()
        self._messages = client.pubsub(ignore_subscribe_messages=True)
        self._messages.psubscribe(f"{ROOT}*")

    def load(self) -> None:
        """Loads it, anew if it is there."""
        if self.as_function:
            self.client.function_load(self._library.source, replace=True)
        else:
            self._hash = self.client.script_load(self._library.script.source)

    def answer(self, packed: bytes, now_us: int | None = None) -> bytes:
        """The answer to a packed call."""
        words = [len(self.keys), *self.keys, packed, *([] if now_us is None else [now_us])]
        if self.as_function:
            return self.client.execute_command("FCALL", self.function, *words)
        return self.client.execute_command("EVALSHA", self._hash, *words)

    def wake_ups(self) -> list[bytes]:
        """What was published since this was asked for last."""
        self.client.publish(ROOT, b"no more")
        found: list[bytes] = []
        while True:
            message = self._messages.get_message(timeout=60)
            if message is not None:
                if message["data"] == b"no more":
                    return found
                found.append(message["data"])

    def execute(self, call: Call, now_us: int) -> tuple[Reply, list[WakeUp]]:
        answer = self.answer(msgspec.msgpack.encode(call), now_us)
        published = [msgspec.msgpack.decode(data, type=WakeUp) for data in self.wake_ups()]
        return msgspec.msgpack.decode(answer, type=Reply), published


@dataclass
class _Kept:
    """What the store has of a state of the ledger in the process, when that is copied."""

    store: Any
    keys: dict[bytes, bytes] | None = None

    def __deepcopy__(self, _: Any) -> _Kept:
        return (
            self if self.keys is not None else _Kept(self.store, {k: self.store.dump(k) for k in self.store.keys("*")})
        )


class Both(Ledger):
    """Both ledgers: each call is answered by both, and the answers must be the same bytes."""

    def __init__(self, stored: StoredLedger) -> None:
        self._stored, self._state = stored, None
        super().__init__()

    @property
    def state(self) -> LedgerState | None:
        if self._state is not None:
            self._state.kept = _Kept(self._stored.client)
        return self._state

    @state.setter
    def state(self, state: LedgerState | None) -> None:
        kept = getattr(state, "kept", None)
        if state is None or (kept is not None and kept.keys is not None):
            self._stored.client.flushdb()
            for key, dump in (kept.keys if kept is not None else {}).items():
                self._stored.client.restore(key, 0, dump)
        self._state = state

    def execute(self, call: Call, server_us: int) -> tuple[Reply, list[WakeUp]]:
        packed = msgspec.msgpack.encode(call)
        reply, wake_ups = super().execute(msgspec.msgpack.decode(packed, type=Call), server_us)
        answer, published = self._stored.answer(packed, server_us), self._stored.wake_ups()
        expected = msgspec.msgpack.encode(reply)
        found = msgspec.msgpack.decode(answer, type=Reply)
        if msgspec.msgpack.encode(found) != expected:  # a whole number may be packed as such where a tag is meant
            raise AssertionError(f"{call}\n{difference(reply, found)}\n{expected.hex()}\n{answer.hex()}")
        told = [msgspec.msgpack.decode(each, type=WakeUp) for each in published]
        assert told == wake_ups, (call, wake_ups, told)
        return reply, wake_ups


def difference(expected: Reply, found: Reply) -> str:
    """The fields of two replies that are not the same."""
    names = [name for name in expected.__struct_fields__ if getattr(expected, name) != getattr(found, name)]
    return "\n".join(f"{name}: {getattr(found, name)}\n  not {getattr(expected, name)}" for name in names)
