"""The request as the app gets it, and what the middlewares around see of that.

The engine's priority and key replace the client's; every other byte of the body stays. An engine says the usage of a
chat's or a text completion's stream only where `stream_options` ask for it, in one more event, without choices, before
the end. Its other events are the same, asked or not (read from vLLM 0.32, SGLang 0.5.23, TensorRT-LLM and Dynamo 1.6):
where they have a null `usage`, they have it in either case. One thing differs: vLLM has its `system_fingerprint` in the
last event, which is then the one that is taken out.

The app gets a copy of the scope. Routers, and what comes with them, say in it what they found: `route`, `endpoint`,
`path_params`, `user`. The middlewares around look there when the response begins, and when the app has returned. So at
both moments they are shown what the app has written. Its headers and its path are not: those of the copy may be ours,
with the engine's key.

In `mode: pass` requests go to the app as they came (`pass_on`). Nothing of the body is read, and the pool is not asked.
Two changes are necessary. A path that the policy maps with `forward_to` is mapped, because the engine need not know it.
And the engine's own key, where there is one, replaces the client's, which the engine would refuse. A request without a
key gets it only where the policy has a tier for such requests, or a gateway or the app names its tenant: else everyone
would have the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.answer import Answer, without_files
from sidecar.admission.client import ClientChannel
from sidecar.admission.controller import AdmissionController
from sidecar.admission.handover import CALL_KEY, ENGINE_ID_KEY, WRITE_KEY
from sidecar.admission.intake import CONTENT_ENCODING, MAXIMUM_FIELDS, SizedRequest
from sidecar.admission.model_names import with_model
from sidecar.admission.request_path import guarded_endpoint, path_for_app
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.context import SCOPE_KEY, Granted
from sidecar.engines.base import Engine, Forward
from sidecar.engines.registry import CLIENT_MEMBERS
from sidecar.events import Headers
from sidecar.identity.classify import TenantClaims, named_by_app
from sidecar.payload.decode import Payload
from sidecar.payload.edit import insert, remove
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.pools import Grant

if TYPE_CHECKING:
    from sidecar.admission.answer_edits import Edit
    from sidecar.admission.policy_snapshot import PolicySnapshot
    from sidecar.identity.service_tiers import ServiceTiers

_CHAT, _COMPLETIONS = Api.CHAT, Api.COMPLETIONS
"""The APIs whose streams have to be asked; those of the others always say their usage. An enumeration's attribute costs
as much as a call."""
_NOT_ASKED = (None, False, "false", "0", "no", "off", "n", "f")
"""Values of `include_usage` that do not ask, as engines read them (pydantic)."""
_SERVICE_TIER = "service_tier"
_SERVICE_TIER_IN = {
    Api.CHAT: ((_SERVICE_TIER,), (_SERVICE_TIER,), "choices"),
    Api.RESPONSES: ((_SERVICE_TIER,), ("response", _SERVICE_TIER), "output"),
    Api.MESSAGES: (("usage", _SERVICE_TIER), ("message", "usage", _SERVICE_TIER), "input_tokens"),
}
"""Where an API says the tier that was granted: in a whole answer, in a stream's events, and beside which member."""


class _Options(msgspec.Struct):
    include_usage: Any = msgspec.UNSET


_decode_options = msgspec.json.Decoder(_Options).decode


def ask_for_usage(request: SizedRequest, engine: Engine | None, usage: UsageReader) -> bytes | None:
    """The `stream_options` that ask the engine for usage in the client's place.

    None where there is nothing to ask: the client asks itself, the answer is no stream of events, or the options are
    none that an engine accepts. Where no engine is asked, `usage` measures the text of the answer instead.
    """
    if request.api is not _CHAT and request.api is not _COMPLETIONS:
        return None
    if engine is None:
        usage.text_bytes = 0
    elif request.payload.stream:
        return _asking_options(request.payload.stream_options, engine)
    return None


def _asking_options(written: bytes | None, engine: Engine) -> bytes | None:
    if written is None or written == b"null":
        return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in engine.usage_options.items())
    try:
        asked = _decode_options(written).include_usage
    except msgspec.ValidationError:
        return None
    if asked is msgspec.UNSET:
        asked = engine.asks_usage_by_default
    if (asked.lower() if isinstance(asked, str) else asked) not in _NOT_ASKED:
        return None
    options = written
    for name, value in engine.usage_options.items():
        options = insert(remove(options, (name,)), name, value)
    return options


def request_for_app(
    request: SizedRequest,
    snapshot: PolicySnapshot,
    endpoint: Endpoint,
    scope: Scope,
    pairs: Headers,
    *,
    forward: Forward,
    added: Headers,
    client: ClientChannel,
    answer: Answer,
    is_proxied: bool,
) -> tuple[Scope, bytes]:
    """The scope and the body for the app, which gets the priority by `forward`. The way back to the client is ready.

    `pairs` are the client's headers as they came, `added` those that replace them. See also `forwarded_body`.
    """
    payload, tiers, engine = request.payload, snapshot.classifier.service_tiers, snapshot.asks_usage_of
    is_edited = request.engine_model is not None or payload.service_tier is not None
    if is_edited and (edits := _answer_edits(request, tiers)):
        client.edit(edits)
    options = ask_for_usage(request, engine, answer.usage) if engine is None or payload.stream else None
    if options is not None:
        client.hide_usage()
    body = forwarded_body(_own_body(request, tiers), payload, forward, options)
    if b"content-length" in request.headers and (body is not payload.body or CONTENT_ENCODING in request.stripped):
        added = (*added, (b"content-length", b"%d" % len(body)))
    for_app = forwarded_scope(scope, endpoint, forwarded_headers(pairs, request.stripped, added))
    # Of the server's short ways only those stay on which no byte passes unread, or without its edit.
    editor, is_plain = client.editor, client.keepalive is None
    if not is_plain or editor is not None or (endpoint.cost is not None and endpoint.cost.member):
        for_app["extensions"] = without_files(for_app)
    if (write := for_app.get(WRITE_KEY)) is not None:
        write = write if editor is None else partial(editor.write, write)
        for_app[WRITE_KEY] = partial(answer.write, write) if is_plain and is_proxied else None
    return for_app, body


def _answer_edits(request: SizedRequest, tiers: ServiceTiers | None) -> list[Edit]:
    """Edits by which an answer has the client's own name of the model, and the `service_tier` that a client who asked
    for one has got, in its API's own member.
    """
    from sidecar.admission.answer_edits import Edit

    api, asked, edits = request.api, request.payload.service_tier, list[Edit]()
    if request.engine_model is not None:
        from sidecar.admission.answer_edits import model_edits

        edits += model_edits(request.payload.model or "", request.engine_model)
    if tiers is not None and asked not in (None, b"null") and api in _SERVICE_TIER_IN:
        assert asked is not None
        whole, streamed, beside = _SERVICE_TIER_IN[api]
        name = tiers.granted_name(api, request.classification.level, asked)
        edits.append(Edit(streamed if request.payload.stream else whole, b'"%b"' % name.encode(), beside))
    return edits


def _own_body(request: SizedRequest, tiers: ServiceTiers | None) -> bytes:
    """The client's body with the output cap, where it has one, as its only maximum, the model as the engine names it,
    and without a `service_tier` that was read here. Every other byte stays.
    """
    payload, cap = request.payload, request.output_cap
    body = payload.body
    if cap is not None:
        for field in MAXIMUM_FIELDS[request.api]:
            body = remove(body, (field,))
        body = insert(body, MAXIMUM_FIELDS[request.api][0], b"%d" % cap)
    if tiers is not None and payload.service_tier is not None and tiers.is_read(payload.service_tier):
        body = remove(body, (_SERVICE_TIER,))
    return body if request.engine_model is None else with_model(body, request.engine_model)


def new_granted(grant: Grant, request: SizedRequest, policy: Policy, priority: int | float, request_id: str) -> Granted:
    """The grant for an app in the same process."""
    classification = request.classification
    tier, tenant = policy.tiers[classification.level].name, classification.tenant.name
    waited_s, starved_s = grant.queue_wait_us / 1e6, grant.starvation_us / 1e6
    return Granted(tier, tenant, grant.level, priority, waited_s, starved_s, request.tokens, request_id)


def forwarded_body(body: bytes, payload: Payload, forward: Forward, stream_options: bytes | None = None) -> bytes:
    """Removes every priority of the client's and inserts the engine's, and other `stream_options` where there are any.

    The same object where nothing changes.
    """
    if stream_options is not None:
        if payload.stream_options is not None:
            body = remove(body, ("stream_options",))
        body = insert(body, "stream_options", stream_options)
    if payload.priority is not None or payload.nvext is not None:  # hardly any request has one
        is_there = {"priority": payload.priority is not None, "nvext": payload.nvext is not None}
        for path in CLIENT_MEMBERS:
            if is_there[path[0]]:
                body = remove(body, path)
    return body if forward.member is None else insert(body, "priority", forward.member)


def forwarded_headers(
    headers: Headers, stripped: Sequence[bytes], added: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """The client's headers without those `stripped`, and with `added` in place of headers of the same names.

    A client lists in `Connection` the headers that a proxy must drop. It may not list one that is added here: the
    request would reach the engine without its granted priority, which some engines take for the best priority.
    """
    names = dict(added)
    gone = {*stripped, *names}
    kept = [
        (name, _without(names, value) if name == b"connection" else value)
        for name, value in headers
        if name not in gone
    ]
    return [*kept, *added]


def _without(names: Container[bytes], connection: bytes) -> bytes:
    """A value of `Connection`, without these names."""
    return b", ".join(token for part in connection.split(b",") if (token := part.strip()).lower() not in names)


def forwarded_scope(scope: Scope, endpoint: Endpoint, headers: Headers) -> Scope:
    """A copy of the scope, with these headers and the path that the engine knows, however the client has spelled it.

    The scope itself, where nothing changes.
    """
    path = path_for_app(scope, endpoint)
    if path == scope["path"] and headers is scope["headers"]:
        return scope
    copy = {**scope, "headers": headers}
    if path != scope["path"]:
        copy["path"], copy["raw_path"] = path, quote(path).encode()
    return copy


_OURS = frozenset(("headers", "path", "raw_path", SCOPE_KEY, CALL_KEY, ENGINE_ID_KEY))
_LEAST_OURS = 2
"""Keys that every copy has, and the scope outside has not: the grant and the call."""
_BEGINNINGS = frozenset(("http.response.start", "websocket.accept", "websocket.http.response.start"))


def show_outside(written: Scope, scope: Scope, *, is_shown: bool = False) -> None:
    """Shows in the `scope` of the middlewares around what an app has written into its copy.

    Of one that `is_shown` already, as its answer began, only more keys are looked for: hardly any app writes then.
    """
    if is_shown and len(written) <= len(scope) + _LEAST_OURS:
        return
    shown = {**written}  # at once: a handler's thread may write meanwhile
    for name in _OURS:
        shown.pop(name, None)
    scope.update(shown)


def call_app(
    controller: AdmissionController, scope: Scope, for_app: Scope, receive: Receive, send: Send
) -> Awaitable[None]:
    """Calls the app with the scope `for_app`, which is `scope` itself or a copy."""
    if controller.snapshot.names.renamed and for_app.get("method") == "POST":
        from sidecar.admission.answer_edits import call_renamed

        return call_renamed(controller, scope, for_app, receive, send)
    if for_app is scope or controller.is_proxied:  # around our own proxy there is no one
        return controller.app(for_app, receive, send)
    return call_and_show(controller, scope, for_app, receive, send)


async def call_and_show(
    controller: AdmissionController, scope: Scope, for_app: Scope, receive: Receive, send: Send
) -> None:
    """Calls the app, and shows the middlewares around what it writes into its scope."""

    def send_and_show(message: Message) -> Awaitable[None]:
        if message["type"] in _BEGINNINGS:
            show_outside(for_app, scope)
        return send(message)

    try:
        await controller.app(for_app, receive, send_and_show)
    finally:
        show_outside(for_app, scope)


def pass_on(controller: AdmissionController, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Serves an ASGI scope, other than a lifespan's, with the app alone."""
    return call_app(controller, scope, _for_app(controller, scope), receive, send)


def _for_app(controller: AdmissionController, scope: Scope) -> Scope:
    policy, credentials = controller.policy, controller.snapshot.credentials
    if credentials.added:
        stripped, named = credentials.stripped(dict(scope["headers"])), named_by_app.get()
        named_by_app.set(None)  # the app may have another admission controller in it
        if stripped or policy.anonymous is not None or isinstance(named, TenantClaims):
            scope = {**scope, "headers": forwarded_headers(scope["headers"], stripped, credentials.added)}
    endpoint = guarded_endpoint(controller.snapshot.named_endpoints, scope)
    return scope if endpoint is None else forwarded_scope(scope, endpoint, scope["headers"])


def pass_read(
    controller: AdmissionController, scope: Scope, request: SizedRequest, receive: Receive, client: ClientChannel
) -> Awaitable[None]:
    """Passes a `request` that was read, and may have waited. `receive` begins with its body again."""
    for_app = {**scope}
    for_app.pop(WRITE_KEY, None)  # the client may have got comments before
    stripped, added = [], []
    if client.keepalive is not None:  # comments have begun the answer, as plain text
        stripped.append(b"accept-encoding")
    if CONTENT_ENCODING in request.stripped:  # the body was unpacked
        stripped.append(CONTENT_ENCODING)
        if b"content-length" in request.headers:
            added.append((b"content-length", b"%d" % len(request.body)))
    if stripped:
        for_app["headers"] = forwarded_headers(scope["headers"], stripped, added)
    return call_app(controller, scope, _for_app(controller, for_app), receive, client.send)
