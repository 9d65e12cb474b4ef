"""Cost of placement: instructions of `sidecar serve` for one request, before one engine and before sixteen.

The same policy, once with `--upstream` as before there were fleets, once with `engines:` of one, and of sixteen. Every
process is counted as in `benchmarks.instructions`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.fleet import routers
from benchmarks.fleet.engines import Engine
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict
from benchmarks.instructions.__main__ import usable
from benchmarks.instructions.counters import IDLE, CannotCount
from benchmarks.instructions.proxied import run_before
from benchmarks.overhead import HEADERS
from sidecar.policy.tenant_keys import hash_line

MANY = 16
MOST_TIMES_MANY = 1.3
KEY = dict(HEADERS)["Authorization"].removeprefix("Bearer ")
TENANT = f"tenant: standard\nkeys: [{hash_line(KEY)}]\ntier: normal\n"
"""The tenant whose requests `benchmarks.instructions` sends."""
PARTS = ("proxied", IDLE)
UPSTREAM_POLICY = f"""\
engine: vllm
capacity: {{tokens: 500000, requests: 128}}
{routers.TIERS}endpoints:
  /v1/chat/completions: {{}}
"""


def run(name: str, setting: Setting) -> Sequence[Verdict]:
    """Only `ours` has instructions to count."""
    if name != routers.OURS:
        raise routers.NotStarted(f"the cost is counted for {routers.OURS} alone, not for {name}")
    try:
        counter = usable(None, for_check=False)
    except CannotCount as reason:
        return [Verdict("instructions of a request", None, str(reason))]
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for engines in (0, 1, MANY):
            arguments = partial(_arguments, Path(folder) / str(engines), engines, setting)
            try:
                counts[engines] = counter.measure(
                    lambda prefix, environment, parts, arguments=arguments, engines=engines: run_before(  # type: ignore[misc]  # the defaults bind the loop's values
                        max(engines, 1), prefix, environment, parts, arguments
                    ),
                    PARTS,
                )["proxied"]
            except RuntimeError as error:
                raise routers.NotStarted(f"ours did not start with {engines} engines: {error}") from None
    for engines, count in counts.items():
        print(f"{'--upstream' if not engines else f'{engines} engines':>12} {count:12,.0f} instructions a request")
    return judge(counts)


def judge(counts: Mapping[int, float]) -> Sequence[Verdict]:
    """By the number of engines; 0 is `--upstream`."""
    return [
        Verdict.at_most(f"{MANY} engines, to one", counts[MANY] / counts[1], MOST_TIMES_MANY),
        Verdict.at_most(f"{MANY} engines, to --upstream", counts[MANY] / counts[0], MOST_TIMES_MANY),
    ]


def _arguments(folder: Path, engines: int, setting: Setting, urls: Sequence[str]) -> Sequence[str]:
    folder.mkdir(exist_ok=True)
    listed = [Engine(f"engine-{number}", url, 0, ()) for number, url in enumerate(urls, 1)]
    text = routers.policy(listed, setting) if engines else UPSTREAM_POLICY
    (folder / "policy.yaml").write_text(text + "tenants: tenant.yaml\n")
    (folder / "tenant.yaml").write_text(TENANT)
    upstream = [] if engines else ["--upstream", urls[0]]
    return [*upstream, "--policy", str(folder)]
