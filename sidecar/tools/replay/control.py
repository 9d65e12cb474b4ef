"""Neutral control of a replay: the same arrivals at an engine that treats all of them alike.

A sidecar that enforces is no place for one: each request there is under some tier's limit, queue bound and maximum
wait, and under its tenant's limits. A control under these would refuse requests that the other run serves, and those
that remain would look fast. So the control goes to the engine itself, or to a sidecar that observes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.apis import Api
from sidecar.tools.replay.prompts import PATHS
from sidecar.tools.replay.server import AskedServer


class NotNeutral(ValueError):
    """The control would be under admission control. The text names the server, and what to do."""


@dataclass(frozen=True, slots=True)
class Control:
    """The servers that get the control's requests, and the key that all of them send, None for none.

    `is_named` says that the servers were given for the control alone. They get no tenant's key.
    """

    urls: Sequence[str]
    api_key: str | None = field(repr=False)
    is_named: bool


async def require_neutral(control: Control, api: Api) -> None:
    """Asks every server of the control whether admission control is in force there. It generates nothing for that.

    Raises NotNeutral, and ServerNoAnswer for a server that cannot be asked or that refuses the key.
    """
    option = "--control-upstream" if control.is_named else "--control"
    for url in control.urls:
        async with AskedServer(url, control.api_key) as server:
            if await server.enforces(PATHS[api]):
                raise NotNeutral(
                    f"{option}: {url} enforces admission control: a control there is under one tier's limits, and "
                    "refuses requests that the other run serves; write --control-upstream URL with the address of "
                    "the engine itself (docs/tools.md#replay says what to do where it has none)"
                )
            if control.is_named:
                await server.identity()
