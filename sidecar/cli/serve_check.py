"""Checks before `sidecar serve` begins: fit of the policy and the engines.

It is `sidecar doctor --read-only`, for a few seconds at most. Nothing is sent that generates. What is found goes into
the log, and never keeps the command from serving: an engine may begin later than its sidecar.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from sidecar.cli.doctor import of_upstream, with_engines
from sidecar.policy.fleet import EngineAddress
from sidecar.policy.model import Policy
from sidecar.policy.secrets import ENGINE_KEY_VARIABLE, secret_for_header
from sidecar.tasks import timeout
from sidecar.tools.doctor.examination import Examination, Options, examine
from sidecar.tools.doctor.report import mistakes
from sidecar.tools.doctor.several_engines import ExaminedEngine, find_places, findings
from sidecar.tools.doctor.survey import CannotLook

WITHIN_S = 3.0
"""For all engines together, which are examined at the same time: a page takes milliseconds."""
MOST_ENGINES = 32

_log = logging.getLogger("sidecar.serve")


def check_engines(policy: Policy, upstream: str | None) -> None:
    """Examines the engine at `upstream`, or those that the policy names, and logs each mistake with what to change."""
    try:
        if upstream is not None:
            asyncio.run(_check_one(of_upstream(policy, upstream) or policy, upstream))
        elif policy.engines is not None:
            fleet = with_engines(policy).engines
            asyncio.run(_check_each(policy, () if fleet is None else fleet.static))
    except CannotLook as reason:
        _log.info("the engines could not be examined: %s", reason, extra={"event": "check_not_made"})
    except Exception:
        _log.exception("a defect in the check of the engines; going on without it", extra={"event": "defect"})


async def _check_one(policy: Policy, url: str) -> None:
    seen = await _examine(policy, url)
    if seen is not None:
        _tell(f"the engine at {url}", seen)


async def _check_each(policy: Policy, engines: Sequence[EngineAddress]) -> None:
    asked = engines[:MOST_ENGINES]
    seen = await asyncio.gather(*(_examine(policy.of_engines([engine]), engine.url) for engine in asked))
    places = await asyncio.gather(*(find_places(engine.url) for engine in asked))
    for engine, one in zip(asked, seen, strict=True):
        if one is not None:
            _tell(f"engine {engine.name}", one)
    together = [ExaminedEngine(*each) for each in zip(asked, places, seen, strict=True)]
    for finding in findings(policy.of_engines(asked), together):
        _log.warning("the engines together: %s: %s", finding.text, finding.fix, extra={"event": "check"})


async def _examine(policy: Policy, url: str) -> Examination | None:
    key = secret_for_header(os.environ, ENGINE_KEY_VARIABLE)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    options = Options(url=url, policy=policy, headers=headers, reads_only=True)
    try:
        async with timeout(WITHIN_S):
            return await examine(options, _log.info)
    except (CannotLook, asyncio.TimeoutError) as reason:
        cause = str(reason) or f"no answer within {WITHIN_S:g} s"
        _log.info("the engine at %s was not examined: %s", url, cause, extra={"event": "check_not_made"})
        return None


def _tell(title: str, seen: Examination) -> None:
    """Logs what is broken, and where policy and engine differ; one line where nothing is."""
    found = mistakes(seen)
    for mistake in found:
        _log.warning("%s: %s", title, mistake, extra={"event": "check"})
    if not found:
        _log.info("%s fits the policy, as far as its pages say", title, extra={"event": "check"})
