"""Models with pools of their own, in one process.

Each model has an admission controller of its own: its pool, its engines, and what is observed of them. The front is the
controller of the process. It has the policy as a whole, reads requests, and hands each to the controller of its model
before it enters a pool. What belongs to requests of no model (a wrong key, an unknown model) stays with the front.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.answer_edits import read_for_model
from sidecar.admission.controller import AdmissionController, Monitor, Services
from sidecar.admission.forwarding import call_app, forwarded_headers
from sidecar.admission.handover import WRITE_KEY
from sidecar.admission.intake import NOT_PACKED, SizedRequest, is_upload
from sidecar.admission.model_names import ModelNames
from sidecar.admission.request_path import asked_model, exact_paths, guarded_endpoint
from sidecar.admission.responses import request_id, send_error, send_json
from sidecar.admission.unguarded import checked_with_keys, is_refused
from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.errors import AdmissionError, EngineUnreachable
from sidecar.events import AppTrace, Classified, Event, Headers, Observation, Observer, Received
from sidecar.middleware import ReadModel, serve_scope
from sidecar.policy.choices import Unguarded
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Tenant

_OF_A_MODEL = frozenset(("pool", "lease_sizes", "gain"))
"""Parts of the state that each model has for itself."""


class ModelsController(AdmissionController):
    """The front of several pools. `controllers` are those of the models, by the models' names.

    The app of its services takes the requests that no pool admits, and serves the lifespan of all engines. No request
    enters the front's own pool: it is the clock, and has the tenants' limits, which count for all models. Where each
    model `counts_apart`, in a store, its own pool has the limits. Watchdog and identities are those of all models.
    """

    def __init__(
        self,
        services: Services,
        policy: Policy,
        *,
        controllers: Mapping[str, AdmissionController],
        counts_apart: bool,
    ) -> None:
        self.controllers = controllers
        self.counts_apart = counts_apart
        watch = ModelsHealth({name: one.engine_watch for name, one in controllers.items()})
        super().__init__(replace(services, is_proxied=True, unguarded=Unguarded.DENY, engine_watch=watch), policy)

    def controller_for(self, request: SizedRequest) -> AdmissionController:
        """The controller of a request's model. Raises InvalidBody or ModelNotFound: see `ModelNames.model_for`."""
        tenant = request.classification.tenant
        return self.controllers[self.snapshot.names.model_for(request.payload.model, request.body, tenant)]

    def change_policy(self, policy: Policy) -> None:
        """See `AdmissionController.change_policy`."""
        super().change_policy(policy)
        for name, controller in self.controllers.items():
            controller.change_policy(policy.of_model(name))

    def drain(self, within_s: float | None = None) -> None:
        """See `AdmissionController.drain`."""
        super().drain(within_s)
        for controller in self.controllers.values():
            controller.drain()

    def begin_lifespan(self) -> None:
        """See `AdmissionController.begin_lifespan`."""
        super().begin_lifespan()
        for controller in self.controllers.values():
            controller.begin_lifespan()

    async def drained(self) -> None:
        """See `AdmissionController.drained`."""
        await super().drained()
        if not self.passes_all:
            for controller in self.controllers.values():
                await controller.background.emptied()

    @property
    def under_way(self) -> int:
        """See `AdmissionController`."""
        return len(self.watchdog) + sum(len(controller.background) for controller in self.controllers.values())

    def readiness(self) -> Sequence[str]:
        """See `AdmissionController.readiness`. Reasons only where no model at all can be served."""
        return [*(["draining"] if self.is_draining else []), *(() if self.passes_all else self.not_ready())]

    def not_ready(self) -> Sequence[str]:
        """See `AdmissionController.not_ready`."""
        reasons = {name: controller.not_ready() for name, controller in self.controllers.items()}
        return _name_models(reasons) if all(reasons.values()) else []

    def notices(self) -> Sequence[str]:
        """See `AdmissionController.notices`. Among them is each model that cannot be served while another can."""
        reasons = {name: controller.not_ready() for name, controller in self.controllers.items()}
        of_all = [*([self.mode_notice()] if self.passes_all else []), *self.identities.notices()]
        notices = {
            name: [notice for notice in controller.notices() if notice not in of_all]
            for name, controller in self.controllers.items()
        }
        return [
            *of_all,
            *(() if self.passes_all or all(reasons.values()) else _name_models(reasons)),
            *_name_models(notices),
            *self.monitor.notices(),
        ]

    def state(self) -> Mapping[str, object]:
        """See `AdmissionController.state`. `models` has the state of each model's pool, and there is no other pool."""
        state = {key: value for key, value in super().state().items() if key not in _OF_A_MODEL}
        states = {name: controller.state() for name, controller in self.controllers.items()}
        held = [controller.pending_aborts.held() for controller in self.controllers.values()]
        return {
            **state,
            "shadows": sum(len(controller.shadows) for controller in self.controllers.values()),
            "aborting": {"requests": sum(one.requests for one in held), "tokens": sum(one.tokens for one in held)},
            "background": sum(len(controller.background) for controller in self.controllers.values()),
            "models": {
                name: {key: value for key, value in one.items() if key == "engine" or key in _OF_A_MODEL}
                for name, one in states.items()
            },
        }

    def _observer(self, monitor: Monitor) -> Observer | None:
        """The observer of each request's model; the monitor's own gets the requests of no model."""
        own = monitor.observer
        return None if own is None else ModelsObserver(own, lambda model: self._observer_for(model) or own)

    def _observer_for(self, named: str | None) -> Observer | None:
        model = self.snapshot.names.meant(named)
        return None if model is None else self.controllers[model].observer


def _name_models(sentences: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"model {name}: {sentence}" for name, about in sentences.items() for sentence in about]


class ModelsHealth(EngineHealth):
    """See `EngineHealth`. Requests can be sent while one model at least has an engine.

    The controllers of the models open and close their own `watches`, which are by the models' names.
    """

    def __init__(self, watches: Mapping[str, EngineHealth]) -> None:
        super().__init__()
        self._watches = watches
        for watch in watches.values():
            watch.on_change.append(self._look)
        self._look()

    def _look(self) -> None:
        """Takes the state that all models have; of several, the first of up, unknown, down."""
        found = {watch.state for watch in self._watches.values()}
        of_several = (state for state in (EngineState.UP, EngineState.UNKNOWN) if state in found)
        state = next(iter(found)) if len(found) == 1 else next(of_several, EngineState.DOWN)
        if state is not self.state:
            self.state, self.since_s = state, time.monotonic()
        self._changed()

    def readiness(self) -> Sequence[str]:
        """See `EngineHealth`."""
        reasons = {name: watch.readiness() for name, watch in self._watches.items()}
        return _name_models(reasons) if all(reasons.values()) else []

    def notices(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return _name_models({name: watch.notices() for name, watch in self._watches.items()})


class ModelsObserver:
    """Reports requests to the observers of their models, and those of no model to `own`.

    `observer_of` is called with a request's `model`.
    """

    def __init__(self, own: Observer, observer_of: Callable[[str | None], Observer]) -> None:
        self._own = own
        self._observer_of = observer_of

    def listens(self) -> bool:
        """See `Observer`."""
        return self._own.listens()

    def follows(self) -> bool:
        """See `Observer`."""
        return True

    def received(self, event: Received) -> Observation | None:
        """See `Observer`."""
        return _ModelObservation(event, self._own, self._observer_of)


class _ModelObservation:
    """One request. Its first event says whether it has a model: then it was classified, else it is refused."""

    __slots__ = ("_observation", "_observer_of", "_own", "_received")

    def __init__(self, received: Received, own: Observer, observer_of: Callable[[str | None], Observer]) -> None:
        self._received: Received | None = received
        self._own = own
        self._observer_of = observer_of
        self._observation: Observation | None = None

    def headers(self) -> Headers:
        """See `Observation`."""
        return () if self._observation is None else self._observation.headers()

    def app_trace(self) -> AppTrace | None:
        """See `Observation`."""
        return None if self._observation is None else self._observation.app_trace()

    def on_event(self, event: Event) -> None:
        """See `Observation`."""
        received, self._received = self._received, None
        if received is not None:
            observer = self._observer_of(event.model) if isinstance(event, Classified) else self._own
            self._observation = observer.received(received)
        if self._observation is not None:
            self._observation.on_event(event)


# -- List of the models, as clients ask for it: `GET /v1/models`, and one of them at `/v1/models/{model}`.
#
# With several pools it is the sidecar's own answer: an engine knows its own models only. It has the fields of
# OpenAI's and of Anthropic's list. An alias stands beside its model, which is its `root`, as vLLM lists an adapter.
# With one pool it is the engine's list, or that of the app around which the middleware is. A name that no engine
# knows stands in it like a model of its own. A tenant that may use certain models sees no trace of the others.

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


# -- Requests to the front of several models' pools: each goes on with the controller of its model.
#
# In `mode: observe` a request passes as soon as its body says which model it is for. One for a model that no pool
# serves goes to an engine all the same, which answers what it would have answered; the report has it as refused.


async def serve_models(
    front: AdmissionController, lifespan: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serves one ASGI scope, as `middleware.serve_scope` does."""
    endpoint, received_us = guarded_endpoint(front.snapshot.endpoints, scope), front.pool.now_us()
    controller: AdmissionController = front
    passes = front.is_observing if endpoint is not None else front.is_passing or _is_harmless(front, scope)
    if passes:
        controller, receive = await _by_model(front, scope, receive, endpoint)
    await serve_scope(front, lifespan, scope, receive, send, model=ReadModel(controller, received_us))


def _is_harmless(front: AdmissionController, scope: Scope) -> bool:
    """True if a request may ask an engine something that generates nothing, such as `/tokenize`."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return any(map(front.snapshot.routes.harmless_route, exact_paths(scope))) and not is_refused(front, scope)


async def _by_model(
    front: AdmissionController, scope: Scope, receive: Receive, endpoint: Endpoint | None = None
) -> tuple[AdmissionController, Receive]:
    """The controller of the model that a request's body names, else the front, with any engine; and the body again.

    Nothing of an upload to an endpoint is read: it names no model. Elsewhere a body that comes too slowly names none.
    """
    if scope["type"] != "http" or scope["method"].upper() != "POST":
        return front, receive
    if endpoint is not None and endpoint.size is not None and is_upload(dict(scope["headers"])):
        return front, receive
    most_s = front.policy.body_timeout_s if endpoint is None else None
    body = await read_for_model(scope["headers"], receive, front.policy.max_body_bytes, most_s)
    model = None if body.text is None else front.snapshot.names.meant(body.model)
    return front if model is None else front.controllers[model], body.receive
