"""Unguarded paths: requests that no endpoint of the policy guards. Some pass, others get a 404.

`deny` passes requests that only read (GET, HEAD, OPTIONS) and the engine's routes that are known to be harmless. Where
requests need a key (`anonymous: deny`), these need one too, but for the policy's `public` paths, and the engine's own
pages, such as its metrics, pass for no one.
`generating` passes an app's own routes as well, and refuses only what may run the model. `allow` passes everything.
In `mode: observe` everything passes, and the count shows what enforcing would refuse.

A WebSocket on a guarded path gets a 426, after which clients such as Codex use HTTP at once; any other status they take
for a failure to try again after.

A path passes only in its exact spelling. In `generating` a path is refused in every spelling that some server might
read as a generating path, and below any mount (`request_path`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial

from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.forwarding import call_app, forwarded_headers
from sidecar.admission.intake import refuse_two_keys
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.request_path import asked_model, exact_paths, find_endpoint, readings, route_path
from sidecar.admission.responses import request_id, send_error, speaks_anthropic
from sidecar.apis import STANDARD_APIS, STANDARD_PATHS, infer_api
from sidecar.engines import NoPriorityEngine
from sidecar.engines.base import Routes
from sidecar.errors import AdmissionError, InvalidApiKey, InvalidBody, NotGuarded, UpgradeRequired
from sidecar.events import UnguardedRequest
from sidecar.identity.classify import api_key, named_by_app
from sidecar.identity.issuer_keys import KeysNeeded, with_keys
from sidecar.policy.choices import Unguarded
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Tenant

READING = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing (RFC 9110, section 9.2.1), but for an engine's `Routes.changing_reads`."""
WEBSOCKET = "WebSocket"
OTHER = "other"
"""The label of every path that is neither a known route of the engine's nor one that the app reports."""
_POLICY_VIOLATION = 1008
_OVER_HTTP = "this path is not served over a WebSocket; send a POST over HTTP"


async def pass_or_refuse(controller: AdmissionController, scope: Scope, receive: Receive, send: Send) -> None:
    """Serves one ASGI scope that no endpoint of the policy guards."""
    if scope["type"] not in ("http", "websocket"):
        _refuse_unknown(controller, scope)
        await controller.app(scope, receive, send)
        return
    is_observing = controller.is_observing
    refusal: AdmissionError | None = None
    try:
        passed, tenant = await checked_with_keys(controller, scope)
        is_read = scope.get("method", "GET") in READING
        if tenant is not None and tenant.models is not None and not is_read and not is_observing:
            receive = await _with_own_model(controller, tenant, scope, receive)
    except AdmissionError as error:
        refusal, passed = error, scope
    if refusal is not None and not is_observing:
        named = request_id(dict(scope["headers"]))
        _report(controller, scope, refusal, refused_as=named)
        await _refuse(scope, receive, send, refusal, named)
        return
    if not is_observing and _may_hide_body(controller, scope):
        receive = _without_body(receive)
    try:
        await call_app(controller, scope, scope if is_observing else passed, receive, send)
    finally:
        if refusal is not None or scope.get("method") not in READING:
            _report(controller, passed, refusal)


def _may_hide_body(controller: AdmissionController, scope: Scope) -> bool:
    """True if a read on a guarded path has no header that says whether it has a body: from HTTP/2 on."""
    is_read = scope.get("method") in READING and scope.get("http_version", "1.1") >= "2"
    is_open = controller.unguarded_mode(scope) is Unguarded.ALLOW
    return is_read and not is_open and _is_guarded(controller.snapshot, scope)


def _without_body(receive: Receive) -> Receive:
    """The client's messages; a body is a disconnect."""

    async def received() -> Message:
        message = await receive()
        if message["type"] == "http.request" and (message.get("body") or message.get("more_body")):
            return {"type": "http.disconnect"}
        return message

    return received


def _refuse_unknown(controller: AdmissionController, scope: Scope) -> None:
    """Raises NotImplementedError for a protocol of which nothing is known here, where it may run the model."""
    as_websocket = treatment(controller.unguarded_mode(scope), controller.snapshot, WEBSOCKET, {"path": "", **scope})
    if as_websocket is Treatment.REFUSED and not controller.is_observing:
        raise NotImplementedError(f"{scope['type']!r} is not served on a path that the policy guards")


def is_refused(controller: AdmissionController, scope: Scope) -> bool:
    """True if `pass_or_refuse` refuses an HTTP request: known before a byte of its body is read."""
    answer = named_by_app.get()
    try:
        _checked(controller, scope)
    except KeysNeeded:
        return False  # not known yet
    except AdmissionError:
        return not controller.is_observing
    finally:
        named_by_app.set(answer)  # for `pass_or_refuse`
    return False


def needs_tenant(controller: AdmissionController, scope: Scope) -> bool:
    """True if `pass_or_refuse` refuses a request unless the app names its tenant."""
    try:
        _checked(controller, scope)
    except InvalidApiKey:
        return True
    except AdmissionError:
        pass
    return False


def not_guarded(method: str, scope: Scope, routes: Routes) -> NotGuarded:
    """The refusal of a path, with the lines of the policy that would change it."""
    path, *others = *exact_paths(scope), *readings(scope)
    page = _first(routes.operators_page, readings(scope)) if method in READING else None
    if page is not None and path not in routes.changing_reads:
        return NotGuarded(
            f"{page} is the engine's own page, and is not shown to clients. For the operator: read it at the engine's "
            "own port, or name it under `public:` in the policy, for everyone."
        )
    route = _first(routes.generating_route, readings(scope))
    if route in others:
        path = route
    # An unknown path may contain a key, and the message goes into the log: such a path is never repeated.
    is_known = path == route or path in routes.changing_reads
    shown = path if is_known or path in STANDARD_PATHS else "PATH"
    api = infer_api(path) or routes.generating.get(route or "")
    if route in routes.generating and api is None:
        written = f"{shown}: {{api: generic, tokens: {{per_kilobyte: 250}}}}"
        guard = f"To guard it, say in the policy, under `endpoints:`, what a request holds: `{written}`."
    elif api is not None and method == "POST":
        body = "{}" if infer_api(path) else f"{{api: {api.value}}}"
        guard = f"To guard it, write under `endpoints:` in the policy: `{shown}: {body}`."
    elif method == "POST":
        apis = ", ".join(dict.fromkeys(api.value for api in STANDARD_APIS.values()))
        guard = f"To guard it, write under `endpoints:` in the policy: `{shown}: {{api: SHAPE}}`, SHAPE one of {apis}."
    else:
        guard = "Only POST requests can be guarded."
    return NotGuarded(
        f"{method} {'to this path' if shown == 'PATH' else shown} is not guarded by the policy of this server, and is "
        f"not served. For the operator: {guard} `unguarded: allow` serves every path without admission."
    )


class Treatment(Enum):
    """The treatment of a request to an unguarded path."""

    PASSES = "passes"
    NEEDS_KEY = "needs a key"
    REFUSED = "refused"


def treatment(mode: Unguarded, snapshot: PolicySnapshot, method: str, scope: Scope) -> Treatment:
    """How `mode` treats a request with the path of `scope`, or a WebSocket."""
    policy, routes = snapshot.policy, snapshot.routes
    if mode is Unguarded.ALLOW:
        return Treatment.PASSES
    if method in READING:
        if _has_body(scope) and _is_guarded(snapshot, scope):  # Django's views ask for no method
            return Treatment.REFUSED
        return _reading(policy, routes, scope) if mode is Unguarded.DENY else Treatment.PASSES
    if _may_generate(snapshot, method, scope):
        return Treatment.REFUSED
    paths = exact_paths(scope) if mode is Unguarded.DENY else (route_path(scope), *readings(scope))
    if method != WEBSOCKET and _first(routes.harmless_route, paths) is not None:
        is_open = mode is Unguarded.DENY and is_public(policy, scope)
        is_engines = mode is Unguarded.DENY or policy.engine is not NoPriorityEngine  # else it is the app's own
        return Treatment.NEEDS_KEY if is_engines and not is_open else Treatment.PASSES
    return Treatment.REFUSED if mode is Unguarded.DENY else Treatment.PASSES


def is_public(policy: Policy, scope: Scope) -> bool:
    """True if the policy names the path, exactly as it is written here, as one that is for everyone."""
    return not frozenset(exact_paths(scope)).isdisjoint(policy.public_paths or ())


def _reading(policy: Policy, routes: Routes, scope: Scope) -> Treatment:
    if is_public(policy, scope):
        return Treatment.PASSES
    paths = readings(scope)
    is_page = policy.public_paths is not None and _first(routes.operators_page, paths) is not None
    if is_page or not routes.changing_reads.isdisjoint(paths):
        return Treatment.REFUSED
    return Treatment.NEEDS_KEY if policy.anonymous is None else Treatment.PASSES


def _first(find: Callable[[str], str | None], paths: Iterable[str]) -> str | None:
    """First answer of `find` that is not None, in the order of the paths."""
    return next((found for found in map(find, paths) if found is not None), None)


def _is_preflight(scope: Scope) -> bool:
    """True if a browser asks if it may send a request: it must send no key with that (Fetch, section 4.8)."""
    asks = scope["type"] == "http" and scope["method"] == "OPTIONS"
    return asks and any(name == b"access-control-request-method" for name, _ in scope["headers"])


async def _with_own_model(controller: AdmissionController, tenant: Tenant, scope: Scope, receive: Receive) -> Receive:
    """The client's messages, once their body is known to name no model that the tenant may not use."""
    from sidecar.admission.answer_edits import read_for_model

    body = await read_for_model(scope["headers"], receive, controller.policy.max_body_bytes)
    if body.text is None:
        raise InvalidBody("the model of this body cannot be read; send JSON, and no more than other requests may have")
    if body.model:
        controller.snapshot.names.refuse_others(tenant, body.model, body.text)
    return body.receive


async def checked_with_keys(controller: AdmissionController, scope: Scope) -> tuple[Scope, Tenant | None]:
    """See `_checked`. Waits for the keys of a token's issuer; the dry run, which holds no request, does not."""
    check = partial(_checked, controller, scope)
    return check() if controller.is_observing else await with_keys(check)


def _checked(controller: AdmissionController, scope: Scope) -> tuple[Scope, Tenant | None]:
    """The scope for the app, and who asks if that counts. Raises NotGuarded, UpgradeRequired or InvalidApiKey."""
    snapshot = controller.snapshot
    if snapshot.names.need_tenant and asked_model(scope) is not None and not is_public(snapshot.policy, scope):
        return with_engine_key(controller, scope)
    is_websocket = scope["type"] == "websocket" or _offers_websocket(snapshot, scope)
    method: str = WEBSOCKET if is_websocket else scope["method"]
    treated = treatment(controller.unguarded_mode(scope), snapshot, method, scope)
    if treated is Treatment.REFUSED:
        if is_websocket and _is_guarded(snapshot, scope):
            raise UpgradeRequired(_OVER_HTTP)
        raise not_guarded(method, scope, snapshot.routes)
    if treated is Treatment.PASSES or _is_preflight(scope):
        return scope, None
    return with_engine_key(controller, scope)


def _may_generate(snapshot: PolicySnapshot, method: str, scope: Scope) -> bool:
    """True if a request may run the model. Any method on a guarded path may: SGLang also answers PUT, and an app's
    route may ask for no method.
    """
    if _is_guarded(snapshot, scope):
        return True
    return method != "DELETE" and _first(snapshot.routes.generating_route, readings(scope)) is not None


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 "))
        for name, value in scope.get("headers", ())
    )


def _is_guarded(snapshot: PolicySnapshot, scope: Scope) -> bool:
    return find_endpoint(snapshot.named_endpoints, scope) is not None


def _offers_websocket(snapshot: PolicySnapshot, scope: Scope) -> bool:
    """True if an HTTP request asks for a WebSocket on a guarded path: the server has left it to its app to decline."""
    is_get = scope["type"] == "http" and scope["method"] == "GET"
    is_offer = is_get and any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"])
    return is_offer and _is_guarded(snapshot, scope)


def with_engine_key(controller: AdmissionController, scope: Scope) -> tuple[Scope, Tenant | None]:
    """The scope with the engine's key in place of the tenant's. Raises InvalidApiKey, as a guarded path would.

    A client with the engine's own key passes unchanged, as no tenant.
    """
    headers = dict(scope["headers"])
    snapshot, key = controller.snapshot, api_key(headers)
    refuse_two_keys(scope["headers"], headers, snapshot)
    if key is not None and controller.engine_key is not None and hmac.compare_digest(key, controller.engine_key):
        return scope, None
    if key is None and snapshot.policy.anonymous is not None and not snapshot.names.are_bounded:
        return scope, None
    tenant = snapshot.classifier.tenant(headers, scope, scope["headers"])
    if tenant is snapshot.policy.anonymous:
        return scope, None
    stripped, added = snapshot.credentials.stripped(headers), snapshot.credentials.added
    if stripped or added:
        scope = {**scope, "headers": forwarded_headers(scope["headers"], stripped, added)}
    return scope, tenant


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: AdmissionError, named: str) -> None:
    is_anthropic = speaks_anthropic(scope["path"])
    if scope["type"] == "http":
        await send_error(send, refusal, anthropic=is_anthropic, request_id=named)
        return
    await receive()  # websocket.connect
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal.code})
        return

    async def send_response(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await send_error(send_response, refusal, anthropic=is_anthropic, request_id=named)


def _report(
    controller: AdmissionController, scope: Scope, refusal: AdmissionError | None, refused_as: str | None = None
) -> None:
    """Reports a request. `refused_as` is its id where it was refused."""
    report = controller.monitor.unguarded
    if report is None:
        return
    report(
        UnguardedRequest(
            route=_label(controller.snapshot.routes, scope),
            is_refused=refused_as is not None,
            code=None if refusal is None else refusal.code,
            message=None if refusal is None else refusal.message,
            status=None if refusal is None else refusal.status,
            request_id=refused_as,
        )
    )


def _label(routes: Routes, scope: Scope) -> str:
    """One of a bounded number of labels: clients choose paths, and every label takes memory for good."""
    paths = readings(scope)
    known = _first(routes.harmless_route, exact_paths(scope)) or _first(routes.generating_route, paths)
    if known is None and scope.get("method") in READING:
        known = _first(routes.operators_page, paths)
    if known is not None:
        return known
    template = getattr(scope.get("route"), "path", None)  # FastAPI leaves the route that it found
    return template if isinstance(template, str) and template else OTHER
