"""Models with pools of their own, in one process.

Each model has an admission controller of its own: its pool, its engines, and what is observed of them. The front is the
controller of the process. It has the policy as a whole, reads requests, and hands each to the controller of its model
before it enters a pool. What belongs to requests of no model (a wrong key, an unknown model) stays with the front.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sidecar.admission.controller import AdmissionController, Monitor, Services
from sidecar.admission.intake import SizedRequest
from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.events import AppTrace, Classified, Event, Headers, Observation, Observer, Received
from sidecar.policy.choices import Unguarded
from sidecar.policy.model import Policy

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
