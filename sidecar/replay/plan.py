"""From rows to requests: one run's `Planned`, with what each of them says about its tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidecar.load import Planned
from sidecar.policy.policy import Api
from sidecar.replay.asking import Asking
from sidecar.replay.bodies import PATHS, Conversation, Writer
from sidecar.replay.row import Row

_APIS = {path: api for api, path in PATHS.items()}


def plan(rows: Sequence[Row], tiers: Sequence[str], writer: Writer, asking: Asking) -> list[Planned]:
    """The requests of one run, in the order of `rows`; `label` is the tier, also where nothing is said about it.

    Turns of one conversation follow each other: one with a time is sent then, but not before its predecessor's answer
    has ended; one without, its delay after that. What the model answered goes into the next turn, as in AIPerf.
    """
    last: dict[str, int] = {}
    conversations: dict[str, Conversation] = {}
    planned: list[Planned] = []
    for index, (row, tier) in enumerate(zip(rows, tiers, strict=True)):
        headers, members = asking.of(tier, _api(writer, row))
        after = None if row.session is None else last.get(row.session)
        conversation = Conversation() if row.session is None else conversations.setdefault(row.session, Conversation())
        planned.append(
            Planned(
                at_s=row.at_s or 0.0,
                path=writer.path(row),
                headers=headers,
                body=b"",
                label=tier,
                after=after,
                delay_s=row.delay_s if row.at_s is None and after is not None else 0.0,
                write=_writing(row, writer, members, conversation),
            )
        )
        if row.session is not None:
            last[row.session] = index
    return planned


def _api(writer: Writer, row: Row) -> Api:
    return _APIS[writer.path(row)]


def _writing(
    row: Row, writer: Writer, members: Mapping[str, Any], conversation: Conversation
) -> Callable[[str], bytes]:
    def write(answer: str) -> bytes:
        own = [] if row.payload is not None else writer.own(row)
        return writer.body(row, conversation.with_turn(row, own, answer), members)

    return write
