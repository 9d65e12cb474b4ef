"""List of the models, as clients ask for it: `GET /v1/models`, and one of them at `/v1/models/{model}`.

With several pools it is the sidecar's own answer: an engine knows its own models only. It has the fields of OpenAI's
and of Anthropic's list. An alias stands beside its model, which is its `root`, as vLLM lists an adapter. With one pool
it is the engine's list, or that of the app around which the middleware is. A name that no engine knows stands in it
like a model of its own. A tenant that may use certain models sees no trace of the others.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.forwarding import call_app, forwarded_headers
from sidecar.admission.handover import with_write
from sidecar.admission.model_names import ModelNames
from sidecar.admission.request_path import exact_paths, readings
from sidecar.admission.responses import REQUEST_ID, request_id, send_error
from sidecar.admission.unguarded import checked_with_keys, is_public, with_engine_key
from sidecar.errors import AdmissionError, EngineUnreachable
from sidecar.identity.issuer_keys import with_keys
from sidecar.policy.fleet_warnings import MODELS_PATH as PATH
from sidecar.policy.tenant import Tenant

_ANTHROPIC = b"anthropic-version"
"""Header that Anthropic's clients send with every request."""
_OF_ANOTHER_ANSWER = (b"range", b"if-range", b"if-none-match", b"if-modified-since", b"accept-encoding")
"""Headers of clients for an answer that is not the whole list."""
_SINCE_S = int(time.time())
_SINCE = datetime.fromtimestamp(_SINCE_S, tz=timezone.utc).isoformat().replace("+00:00", "Z")
_Entry = Mapping[str, Any]


class ListedModel(msgspec.Struct, frozen=True):
    """One entry. `root` is the model that an alias stands for."""

    id: str
    root: str
    display_name: str
    object: str = "model"
    type: str = "model"
    created: int = _SINCE_S
    created_at: str = _SINCE
    owned_by: str = "admission-sidecar"


def is_model_list(path: str) -> bool:
    """True if the models are listed on this path, all or one."""
    return path == PATH or path.startswith(f"{PATH}/")


def asked_model(scope: Scope) -> str | None:
    """The model that a request asks about, empty for the list of all; None for another request."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return None
    path = next(filter(is_model_list, (*exact_paths(scope), *readings(scope))), None)
    return None if path is None else path.removeprefix(PATH).removeprefix("/")


def serve_list(
    controller: AdmissionController, serve: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> Awaitable[None]:
    """Serves one ASGI scope: the list of the models, and everything else with `serve`."""
    asked = asked_model(scope)
    return serve(scope, receive, send) if asked is None else send_models(controller, asked, scope, receive, send)


async def send_models(controller: AdmissionController, asked: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the models of all pools, or with the one that is `asked` for.

    No key is needed for a `public` path, nor where every request passes.
    """
    headers, names = dict(scope["headers"]), controller.snapshot.names
    named = request_id(headers)
    try:
        passed, tenant = await _asking(controller, scope)
        if controller.controllers:
            listed: Mapping[str, Any] = {}
            entries: Sequence[_Entry] = [_entry_of_pool(names, name, model) for name, model in names.called.items()]
        else:
            answer = await _ask_engine(controller, passed, asked, receive)
            if (found := answer.document()) is None and (tenant is None or tenant.models is None or answer.is_error):
                await answer.relay(send)
                return
            if found is None:
                raise EngineUnreachable("the engine's list of its models cannot be read; try again", retry_after_s=1)
            listed, entries = found, _with_aliases(names, found["data"])
        shown = entries if tenant is None else _for_tenant(entries, tenant)
        body = msgspec.json.encode(_one(shown, asked, names, tenant) if asked else _all(listed, shown))
    except AdmissionError as refusal:
        await send_error(send, refusal, anthropic=_ANTHROPIC in headers, request_id=named)
        return
    answered = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID, named.encode("ascii")),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": answered})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _asking(controller: AdmissionController, scope: Scope) -> tuple[Scope, Tenant | None]:
    """The scope for an engine, and the tenant that asks. Raises what is raised for another page that needs a key."""
    if controller.passes_all or is_public(controller.policy, scope):
        return scope, None
    if controller.controllers or controller.snapshot.names.are_bounded:
        return await with_keys(partial(with_engine_key, controller, scope))
    return await checked_with_keys(controller, scope)


def _entry_of_pool(names: ModelNames, name: str, model: str) -> _Entry:
    root = name if name in names.renamed else model
    return dict(msgspec.to_builtins(ListedModel(name, root, name)))


def _with_aliases(names: ModelNames, entries: Sequence[_Entry]) -> Sequence[_Entry]:
    """The engine's models, and the aliases of those that it lists, each as a model of its own."""
    own = {entry["id"]: entry for entry in entries}
    aliases = {
        alias: {**own[model], "id": alias, "root": alias, "parent": None}
        for alias, model in names.renamed.items()
        if model in own
    }
    return list({**own, **aliases}.values())


def _for_tenant(entries: Sequence[_Entry], tenant: Tenant) -> Sequence[_Entry]:
    """The models that a tenant may use; none of these entries names another."""
    hidden = {entry["id"] for entry in entries if not tenant.may_use(entry["id"])}
    return [
        {
            **entry,
            **{key: None if key == "parent" else entry["id"] for key in ("root", "parent") if entry.get(key) in hidden},
        }
        for entry in entries
        if entry["id"] not in hidden
    ]


def _all(listed: Mapping[str, Any], entries: Sequence[_Entry]) -> Mapping[str, Any]:
    ends = [entries[place]["id"] if entries else None for place in (0, -1)]
    own = {"data": entries, "first_id": ends[0], "last_id": ends[1]}
    return {**own, "object": "list", "has_more": False, **listed, **own}


def _one(entries: Sequence[_Entry], asked: str, names: ModelNames, tenant: Tenant | None) -> _Entry:
    """Raises ModelNotFound."""
    found = next((entry for entry in entries if entry["id"] == asked), None)
    if found is None:
        raise names.not_found(asked, tenant)
    return found


class _EngineAnswer:
    """The answer of an engine, or of an app, to a request for its models."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    async def send(self, message: Message) -> None:
        """See ASGI's `send`."""
        self._messages.append(message)

    async def relay(self, send: Send) -> None:
        """Sends it on as it came."""
        for message in self._messages:
            await send(message)

    @property
    def is_error(self) -> bool:
        """True if it has a status that lists nothing."""
        return not self._messages or self._messages[0].get("status", 500) >= 400

    def document(self) -> Mapping[str, Any] | None:
        """The list, None where it is none."""
        body = b"".join(bytes(message.get("body", b"")) for message in self._messages)
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            document = msgspec.json.decode(body, type=dict[str, Any])
            data = document.get("data")
            is_list = isinstance(data, list) and all(isinstance(one, dict) and "id" in one for one in data)
            return document if is_list and not self.is_error else None
        return None


async def _ask_engine(controller: AdmissionController, scope: Scope, asked: str, receive: Receive) -> _EngineAnswer:
    """Asks for the whole list: not every engine shows one model alone."""
    answer = _EngineAnswer()
    path = scope["path"].removesuffix(asked).rstrip("/")
    headers = forwarded_headers(scope["headers"], _OF_ANOTHER_ANSWER, ((b"accept-encoding", b"identity"),))
    for_app = {**scope, "method": "GET", "path": path, "raw_path": quote(path).encode(), "headers": headers}
    with_write(for_app, None)
    await call_app(controller, scope, for_app, receive, answer.send)
    return answer
