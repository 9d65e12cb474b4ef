"""One pool for all middlewares of one policy in a process.

A framework may construct its middleware once for each route, router or mounted app. Each of them has an app of its own,
and all of them have the same pool, monitor, admin port and background tasks: the policy's capacity is there once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admission.controller import AdmissionController
from sidecar.admission.request_path import guarded_endpoint
from sidecar.composition.observability import Observability
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy, is_forced
from sidecar.tasks import running_loop

if TYPE_CHECKING:
    from sidecar.policy.reload import PolicyFiles

NO_ASYNCIO = (
    "the admission middleware needs asyncio, and this server runs another event loop, such as trio: start it with "
    'asyncio (hypercorn: `-k asyncio` or `-k uvloop`; a TestClient: `backend="asyncio"`)'
)
_OTHER_LOOP = (
    "the admission middleware serves in another event loop of this process, and its pool belongs to one: construct app "
    "and middleware once for each loop"
)
_SECOND_LOOP = (
    "the policy of pool %s serves in two event loops of this process: each has a pool of its own, and admits the whole "
    "capacity unless they share a store"
)
_SECOND_POLICY = "another policy serves in this process: pool %s beside pool %s"
_SAME_NAME = (
    "two policies of this process have the pool name %s, and share no room: their metrics, and what they keep in a "
    "store, have the same names; write `pool: NAME` in one of them"
)
_log = logging.getLogger("sidecar.app")


class PolicySource(NamedTuple):
    """Identity of the pool that two middlewares share: the policy's file, or the loaded policy where it was given so,
    and the options of their construction.
    """

    path: Path | None
    policy: Policy | None
    options: tuple[object, ...]

    def is_same(self, other: PolicySource) -> bool:
        """True if both are the same file, be it by another path, or equal policies."""
        if self.options != other.options:
            return False
        if self.path is None or other.path is None:
            return self.path is other.path and self.policy == other.policy
        return _is_same_file(self.path, other.path)


def _is_same_file(path: Path, other: Path) -> bool:
    from sidecar.policy.compiler import POOL_FILE

    files = [each / POOL_FILE if each.is_dir() else each for each in (path, other)]
    try:
        return os.path.samefile(*files)
    except OSError:  # one of them is not there
        return os.path.abspath(files[0]) == os.path.abspath(files[1])


def new_source(
    given: str | Path | Policy | None, files: PolicyFiles | None, options: tuple[object, ...]
) -> PolicySource:
    """The source of a middleware that was given so."""
    if isinstance(given, Policy):
        return PolicySource(None if files is None else files.path, given, options)
    path = _policy_path(given)
    return PolicySource(Path(path) if path else None, None, options)


def _policy_path(given: str | Path | None) -> str | Path:
    return given or os.environ.get(POLICY_VARIABLE, "")


def load_given(given: str | Path | Policy | None) -> tuple[Policy, PolicyFiles | None]:
    """The policy, and its files where it was not loaded before. Without a path SIDECAR_POLICY says where it is.

    Raises ValueError where there is none, PolicyError for its mistakes.
    """
    if isinstance(given, Policy):
        return given, None
    from sidecar.policy.passing import load_or_pass
    from sidecar.policy.reload import files_for

    path = _policy_path(given)
    if not path and not is_forced(os.environ):
        raise ValueError(f"no policy: pass `policy=` or set {POLICY_VARIABLE} to a policy file or its folder")
    return load_or_pass(path, os.environ).policy, files_for(path, os.environ)


class PoolMiddleware(Protocol):
    """A middleware of a pool."""

    def begin_anew(self) -> None:
        """The pool's parts are others: the next scope is as the first."""

    def follow(self) -> None:
        """The pool's policy has changed, or it has more middlewares than before."""


class Composed(NamedTuple):
    """The parts of one pool: its controller, that one's monitor, and the app that serves the server's lifespan."""

    controller: AdmissionController
    observability: Observability
    lifespan: ASGIApp


Compose = Callable[[Policy, "PolicyFiles | None"], Composed]


class OnePool:
    """The controller and the monitor of a policy, for all its middlewares.

    They are composed anew by a lifespan that begins after the last one has ended, or in another event loop than the
    one that was served in: nothing of an event loop that has ended, and no state of its requests, is there then.
    With `is_kept` they stay, because the caller uses them itself. `app` is that of the first middleware. Raises what
    `compose` raises.
    """

    def __init__(  # what a pool is made of
        self,
        source: PolicySource,
        app: ASGIApp | None,
        compose: Compose,
        policy: Policy,
        files: PolicyFiles | None,
        *,
        is_kept: bool,
    ) -> None:
        self.source = source
        self._app = app
        self._compose = compose
        self._policy = policy
        self._files = files
        self._is_kept = is_kept
        self._key = f"sidecar.passage.{id(self)}"
        self.members: WeakSet[PoolMiddleware] = WeakSet()
        self._lifespans = 0
        self._has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin()
        if not is_kept:
            _pools.add(self)

    @property
    def is_shared(self) -> bool:
        """True if several middlewares have it."""
        return len(self.members) > 1

    def may_be_joined(self) -> bool:
        """True if a middleware that is constructed now is another of the same app: nothing was served yet, or it is
        served in this very event loop. Else it is one of an app made anew.
        """
        is_in_use = bool(self.members) and not self._has_ended
        return is_in_use and (self._loop is None or self._loop is running_loop())

    def serves_here(self) -> bool:
        """True if a lifespan is open in the running event loop: whatever else serves there is of the same app."""
        return self.has_lifespan and self._loop is running_loop()

    def is_elsewhere(self) -> bool:
        """True if an event loop that runs in another thread is served."""
        return self._loop is not None and self._loop is not running_loop() and self._loop.is_running()

    def join(self, member: PoolMiddleware) -> None:
        """A middleware has this pool from now on."""
        self.members.add(member)
        if self.is_shared:
            self.controller.use_app(self._pass)
            for each in tuple(self.members):
                each.follow()

    def leave(self, member: PoolMiddleware) -> None:
        """A middleware has another pool from now on."""
        self.members.discard(member)

    @property
    def has_lifespan(self) -> bool:
        """True if a lifespan has reached one of its middlewares, and has not ended."""
        return self._lifespans > 0

    def begin_serving(self) -> None:
        """A scope comes in the running event loop. Raises ValueError where there is none of asyncio's, or another."""
        loop = running_loop()
        if loop is None:
            raise ValueError(NO_ASYNCIO)
        if self.is_elsewhere():
            raise ValueError(_OTHER_LOOP)
        if self._loop is None:
            self._report_others()
        self._loop = loop

    def begin_lifespan(self) -> None:
        """A lifespan begins. Raises what `begin_serving` and `compose` raise."""
        before = self._loop
        self.begin_serving()
        is_over = self._has_ended or before not in (None, self._loop)
        if is_over and not self._lifespans and not self._is_kept:
            self._begin()
            for member in tuple(self.members):
                member.begin_anew()
        self._has_ended = False
        self._lifespans += 1

    def end_lifespan(self) -> None:
        """A lifespan is over."""
        self._lifespans -= 1
        self._has_ended = not self._lifespans

    def serve(self, serve: ASGIApp, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves a scope of one of several middlewares, whose app is `app`. What an outer one of them has admitted
        passes: a second lease might wait for the first.
        """
        outer: _Passage | None = scope.get(self._key)
        if outer is not None and outer.is_guarded:
            return app(scope, receive, send)
        scope[self._key] = _Passage(app, guarded_endpoint(self.controller.snapshot.endpoints, scope) is not None)
        return serve(scope, receive, send)

    def _begin(self) -> None:
        self.controller, self.observability, self.lifespan = self._passing_or_composed()
        self.controller.call_at_change(self._follow)
        if self.is_shared:
            self.controller.use_app(self._pass)

    def _passing_or_composed(self) -> Composed:
        """The parts of the policy. In `mode: pass`, where they cannot be had, those of a bare one."""
        policy, files = self._policy.at(time.time()), self._files
        try:
            composed = self._compose(policy, files)
        except Exception as mistake:
            if policy.mode is not Mode.PASS or policy.is_bare or files is None:
                raise
            from sidecar.policy.passing import bare

            message = "what the policy asks for cannot be had, and is passed over: %s"
            _log.error(message, mistake, extra={"event": "policy_rejected"})
            composed = self._compose(bare(files.path).policy, files)
        composed.controller.report_passing(was_passing=False)
        return composed

    def _follow(self) -> None:
        for member in tuple(self.members):
            member.follow()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app of the middleware that a scope came through; without one, as for the engine's pages, the first."""
        passage: _Passage | None = scope.get(self._key)
        app = self._app if passage is None else passage.app
        assert app is not None
        await app(scope, receive, send)

    def _report_others(self) -> None:
        name = self.controller.policy.pool
        for other in tuple(_pools):
            if other is self or other._has_ended or other._loop is None or not other._loop.is_running():
                continue
            others_name = other.controller.policy.pool
            if other.source.is_same(self.source):
                _log.warning(_SECOND_LOOP, name, extra={"event": "second_loop"})
            elif others_name == name:
                _log.warning(_SAME_NAME, name, extra={"event": "second_policy"})
            else:
                _log.info(_SECOND_POLICY, name, others_name, extra={"event": "second_policy"})


class _Passage(NamedTuple):
    """The app behind a middleware that a scope came through, and whether it decides on that request."""

    app: ASGIApp
    is_guarded: bool


_pools: WeakSet[OnePool] = WeakSet()
"""Those of this process, but for what a caller keeps for itself."""


def find_pool(source: PolicySource) -> OnePool | None:
    """The pool that a further middleware of `source` joins; None where it is the first."""
    return next((pool for pool in tuple(_pools) if pool.may_be_joined() and pool.source.is_same(source)), None)


def pool_here(source: PolicySource) -> OnePool | None:
    """The pool of `source` that the running event loop serves already, None where there is none."""
    return next((pool for pool in tuple(_pools) if pool.serves_here() and pool.source.is_same(source)), None)
