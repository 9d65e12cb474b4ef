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
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.forwarding import call_app, forwarded_headers
from sidecar.admission.handover import WRITE_KEY
from sidecar.admission.intake import NOT_PACKED
from sidecar.admission.model_names import ModelNames
from sidecar.admission.request_path import asked_model
from sidecar.admission.responses import request_id, send_error, send_json
from sidecar.admission.unguarded import checked_with_keys
from sidecar.errors import AdmissionError, EngineUnreachable
from sidecar.policy.tenant import Tenant

_ANTHROPIC = b"anthropic-version"
"""Header that Anthropic's clients send with every request."""
_OF_ANOTHER_ANSWER = (b"range", b"if-range", b"if-none-match", b"if-modified-since")
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


def serve_list(
    controller: AdmissionController, serve: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> Awaitable[None]:
    """Serves one ASGI scope: the list of the models, and everything else with `serve`."""
    asked = asked_model(scope)
    return serve(scope, receive, send) if asked is None else send_models(controller, asked, scope, receive, send)


async def send_models(controller: AdmissionController, asked: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the models that a tenant may use, or with the one that is `asked` for.

    No key is needed for a `public` path, nor where every request passes. An engine's answer that is no list goes on as
    it is, but not to a tenant that may use certain models only.
    """
    headers, names = dict(scope["headers"]), controller.snapshot.names
    named = request_id(headers)
    try:
        passed, tenant = (scope, None) if controller.passes_all else await checked_with_keys(controller, scope)
        if controller.controllers:
            listed = [ListedModel(name, model, name) for name, model in names.called.items()]
            found: Mapping[str, Any] | None = {"data": msgspec.to_builtins(listed)}
        else:
            answer = await _ask_engine(controller, passed, asked, receive)
            found, is_error = _read_list(answer), not answer or answer[0].get("status", 500) >= 400
            if is_error or (found is None and (tenant is None or tenant.models is None)):
                for message in answer:
                    await send(message)
                return
        if found is None:
            raise EngineUnreachable("the engine's list of its models cannot be read; try again", retry_after_s=1)
        entries = _with_aliases(names, found["data"])
        entries = entries if tenant is None else _for_tenant(entries, tenant)
        shown = next((entry for entry in entries if entry["id"] == asked), None) if asked else _list(found, entries)
        if shown is None:
            raise names.not_found(asked, tenant)
    except AdmissionError as refusal:
        await send_error(send, refusal, anthropic=_ANTHROPIC in headers, request_id=named)
        return
    await send_json(scope, send, msgspec.json.encode(shown), named)


def _list(found: Mapping[str, Any], entries: Sequence[_Entry]) -> Mapping[str, Any]:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {**found, "object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": False}


def _with_aliases(names: ModelNames, entries: Sequence[_Entry]) -> Sequence[_Entry]:
    """The models, and the aliases that no engine knows, each as a model of its own, where its model is listed."""
    found = {entry["id"]: entry for entry in entries}
    for alias, model in names.renamed.items():
        if alias is not None and model in found:
            found[alias] = {**found[model], "id": alias, "display_name": alias, "root": alias, "parent": None}
    return list(found.values())


def _for_tenant(entries: Sequence[_Entry], tenant: Tenant) -> Sequence[_Entry]:
    """The models that a tenant may use. None of these entries names another, as its `root` or `parent`."""
    hidden = [entry["id"] for entry in entries if not tenant.may_use(entry["id"])]
    shown = [entry for entry in entries if entry["id"] not in hidden]
    return [{key: value for key, value in entry.items() if value not in hidden} for entry in shown]


async def _ask_engine(controller: AdmissionController, scope: Scope, asked: str, receive: Receive) -> list[Message]:
    """The answer of the engine, or of an app, with all its models: not every engine shows one alone."""
    answer: list[Message] = []

    async def keep(message: Message) -> None:
        answer.append(message)

    path = scope["path"].removesuffix(asked).rstrip("/")
    headers = forwarded_headers(scope["headers"], _OF_ANOTHER_ANSWER, (NOT_PACKED,))
    for_app = {**scope, "method": "GET", "path": path, "raw_path": quote(path).encode(), "headers": headers}
    for_app.pop(WRITE_KEY, None)
    await call_app(controller, scope, for_app, receive, keep)
    return answer


def _read_list(answer: Sequence[Message]) -> Mapping[str, Any] | None:
    """The list in an engine's answer, None where it is none."""
    body = b"".join(bytes(message.get("body", b"")) for message in answer)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, KeyError):
        found = msgspec.json.decode(body, type=dict[str, Any])
        return found if all(isinstance(entry["id"], str) for entry in found["data"]) else None
    return None
