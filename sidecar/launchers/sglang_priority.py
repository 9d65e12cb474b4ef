"""The granted priority for every endpoint of SGLang: in the one place where it sets a request's default priority.

The schemas of responses, messages and several native paths have no field for it, or drop it. But every endpoint calls
`TokenizerManager.generate_request`, and that calls `_set_default_priority` once for each request (SGLang 0.5.23,
`srt/managers/tokenizer_manager.py`: lines 904 and 4013). So that method is changed, and no body is rewritten. The
workers of `--tokenizer-worker-num` inherit it (`srt/managers/multi_tokenizer_mixin.py`: `TokenizerWorker`).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from sidecar.context import granted
from sidecar.launchers.checks import CannotLaunch

_METHOD = "_set_default_priority"
_READ = frozenset(("enable_priority_scheduling", "priority"))
"""The attributes that the method must still use: those that this module relies on."""


def hand_over_in(manager_class: type[Any]) -> None:
    """Makes every request of this class, while it is served for a grant, carry the priority that was granted.

    Raises CannotLaunch where the class is no longer as it was read.
    """
    set_default = _check(manager_class)

    @functools.wraps(set_default)
    def set_granted_priority(self: Any, obj: Any) -> Any:
        grant = granted()
        # Without the queue by priority it might answer 503 to it (--abort-on-priority-when-disabled).
        if grant is not None and self.enable_priority_scheduling:
            obj.priority = int(grant.engine_priority)
        return set_default(self, obj)

    setattr(manager_class, _METHOD, set_granted_priority)


def _check(manager_class: type[Any]) -> Any:
    """The method as it is. Raises CannotLaunch where it is not called for every request with the request alone."""
    method = inspect.unwrap(getattr(manager_class, _METHOD, _missing))
    generate = inspect.unwrap(getattr(manager_class, "generate_request", _missing))
    parameters = list(inspect.signature(method).parameters)
    is_called = _METHOD in generate.__code__.co_names
    if len(parameters) != 2 or not is_called or not _READ.issubset(method.__code__.co_names):
        raise CannotLaunch(
            f"this SGLang takes a request's priority in another way than 0.5.23: {manager_class.__name__}.{_METHOD} is "
            "missing, changed, or not called by generate_request; install 0.5.23, or run `sidecar serve` in front"
        )
    return getattr(manager_class, _METHOD)


def _missing() -> None:
    """Stands for a method that is not there."""
