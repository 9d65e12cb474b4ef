"""`sidecar explain --request`, as an engineer on call runs it: against a sidecar with an engine and clients of its
own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sidecar.admin.app import admin_app
from sidecar.admin.routes import story_routes
from sidecar.cli import main
from sidecar.cli.explain_request import text
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import Explanation, RequestFacts
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.compiler import load
from sidecar.pools import Pool
from sidecar.proxy.proxy import ReverseProxy
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.cluster.views import overview
from tests.support.in_process import ran
from tests.support.late import openai
from tests.support.middleware import KEYS, TestedMiddleware, write_policy
from tests.support.serving import serving
from tests.support.waiting import until
from tests.tools.emulator.emulated import VLLM, emulated

POLICY = """\
engine: vllm
capacity: {tokens: 100k, requests: 2}
tiers:
  high: {reserve: 50%}
  normal: {}
  batch: {}
anonymous: deny
endpoints: {/v1/chat/completions: {}}
tenants: tenants/*.yaml
"""
FOREVER = 20_000  # tokens: at 10 ms each, longer than any test
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there
HELLO: Any = [{"role": "user", "content": "hello"}]
CLOCK = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
LENGTH = r"[\d.]+ m?s"


@dataclass
class Running:
    """A sidecar before an emulated engine."""

    url: str
    admin: str
    journal: Journal

    async def begin(self, tier: str, request_id: str, tokens: int = 5) -> asyncio.Task[int]:
        """Asks as users do, for so many tokens; returns when the request waits or runs."""
        task = asyncio.create_task(self._stream(tier, request_id, tokens))
        await self.until(request_id, "queued", "admitted")
        return task

    async def until(self, request_id: str, *events: str) -> None:
        """Returns when one of these has happened to it."""
        await until(lambda: any(getattr(self.journal.find(request_id), event, None) for event in events))

    async def _stream(self, tier: str, request_id: str, tokens: int) -> int:
        headers = {"x-priority": tier, "x-request-id": request_id}
        async with openai.AsyncOpenAI(api_key=KEYS["acme"], base_url=f"{self.url}/v1", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="emulated", messages=HELLO, max_tokens=tokens, stream=True, extra_headers=headers
            )
            return len([chunk async for chunk in stream])


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    path = write_policy(folder)
    path.write_text(POLICY)
    policy = load(path)
    journal = Journal()
    async with emulated(VLLM, slots=8, step_s=0.01) as engine:
        sidecar = TestedMiddleware(
            ReverseProxy(engine.url),
            policy=policy,
            pool=Pool(policy),
            dialect=policy.engine(policy.carrier),
            estimator=Estimator(),
            observer=EventDispatcher(RequestTracer(), [journal]),
        )
        builder = ExplanationBuilder(journal, lambda: ("high", "normal", "batch"), policy.pool, is_shared=False)
        pages = story_routes(builder, overview)
        admin = admin_app(state=sidecar.state, readiness=sidecar.readiness, routes=pages)
        async with serving(sidecar) as served, serving(admin) as admin_served:
            yield Running(served.url, admin_served.url, journal)


async def explain(*arguments: str) -> tuple[int, str, str]:
    """Its exit code, its output and its errors."""
    ended = await asyncio.to_thread(ran, "explain", *arguments)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.anyio
async def test_the_story_of_a_request_that_was_overtaken(tmp_path: Path) -> None:
    async with running(tmp_path) as sidecar:
        holding = [await sidecar.begin("normal", f"holds-{number}", FOREVER) for number in range(2)]
        sent = [await sidecar.begin("normal", "victim"), await sidecar.begin("high", "overtakes")]
        code, waiting, errors = await explain("--request", "victim", "--admin", sidecar.admin)
        assert (code, errors) == (0, "")
        holding[0].cancel()
        await sidecar.until("overtakes", "admitted")
        await asyncio.sleep(0.05)
        holding[1].cancel()
        assert [await each for each in sent] == [6, 6]
        target = tmp_path / "story.json"
        code, reported, errors = await explain("--request", "victim", "--admin", sidecar.admin, "--json", str(target))
    assert (code, errors) == (0, "")
    assert "\nhas waited " in waiting
    assert re.search(rf"^now +{CLOCK}, after {LENGTH}: waiting$", waiting, re.MULTILINE)
    assert json.loads(target.read_text())["state"] == "completed"

    first, _, conclusion, _, *steps = reported.splitlines()
    assert first == "request victim   POST /v1/chat/completions   pool default"
    assert re.fullmatch(
        rf"waited {LENGTH}, of which {LENGTH} starved: "
        "1 request of tier high went ahead because high held less than its reserve",
        conclusion,
    )
    expected = [
        "asked by     tenant acme",
        "tier         normal, by its header",
        r"holds        \d+ tokens and 1 sequence \(chat of emulated, streamed\)",
        r"sized        It entered with \d+ tokens: prompt \d+ \(at \d\.\d bytes a token\), output 5 \(its max_tokens: "
        r"too few answers are known of tenant acme on /v1/chat/completions, model emulated, bucket `max 64`\)",
        f"arrived      {CLOCK}",
        f"had to wait  {CLOCK}, after {LENGTH}: the pool has no room: 2 of 2 requests are held, and .*",
        rf"overtaken    {CLOCK}, after {LENGTH} by request overtakes of tier high \(tenant acme, \d+ tokens, "
        rf"which arrived at {CLOCK}\): high held less than its reserve",
        f"admitted     {CLOCK}, after {LENGTH} at level 1; priority 10 sent to the engine",
        f"first byte   {CLOCK}, after {LENGTH}, status 200",
        rf"settled      {CLOCK}, after {LENGTH}: completed, status 200, \d+ tokens used",
        r"lease        It held \d+ at its end, and never grew. "
        r"It really used \d+, \d+ of them output, by the engine's count",
        "",
        r"Admitted while it waited: 1 request, \d+ tokens",
        "  tier            because                          requests  tokens",
        r"  high  overtook  high held less than its reserve         1 +\d+",
        "",
        "One by one:",
        "  admitted  .*",
        rf"  {CLOCK} +{LENGTH} +high +acme +\d+ +{LENGTH} later +overtakes",
    ]
    assert len(steps) == len(expected), reported
    for line, pattern in zip(steps, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.anyio
async def test_every_replica_is_asked_until_one_knows(tmp_path: Path) -> None:
    other = Starlette(routes=[Route("/requests/{id}", lambda _: PlainTextResponse("welcome"))])
    async with running(tmp_path) as sidecar, serving(other) as stranger:
        await (await sidecar.begin("high", "quick"))
        admins = ("--admin", NOBODY, "--admin", stranger.url, "--admin", sidecar.admin)
        code, reported, errors = await explain("--request", "quick", *admins)
        assert (code, errors) == (0, "")
        assert "\nadmitted at once, without a wait\n" in reported
        code, reported, errors = await explain("--request", "nobody", *admins)
    assert (code, reported) == (1, "")
    _, unreachable, not_a_sidecar, unknown = errors.splitlines()
    assert unreachable.startswith(f"no answer from {NOBODY}: connection refused; ")
    assert f"{stranger.url}/requests/nobody is not what this version of sidecar reads" in not_a_sidecar
    assert f"{sidecar.admin}: no request with the id or trace id 'nobody' is known here" in unknown


def test_what_a_client_wrote_cannot_move_the_terminal() -> None:
    asked = RequestFacts("t", "high", "key", None, "chat", "m\nrefused      by nobody\x1b[2J", False, 1, 1, None)
    reported = text(Explanation("id", "admitted at once", "running", "lab", 2.0, "POST", "/", 1.0, asked=asked))
    assert "\x1b" not in reported
    assert len(reported.splitlines()) == 9
    assert "m\\nrefused" in reported


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give POLICY and --path for what a request would get, or --request ID for how one fared"),
        (["policies/"], "POLICY needs --path as well, e.g. --path /v1/chat/completions"),
        (["policies/", "--request", "a"], "POLICY and --request do not go together"),
        (["--request", "a", "--path", "/v1"], "--path does not go with --request"),
        (["--request", "a", "--header", "x: y"], "--header does not go with --request"),
        (["policies/", "--path", "/v1", "--admin", NOBODY], "--admin goes with --request"),
        (["--request", " "], "--request is empty"),
        (["--request", "a", "--admin", "door:9464"], "argument --admin: 'door:9464' is no address of an admin port"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    assert ended.value.code == 2
    assert f"sidecar explain: error: {said}" in capsys.readouterr().err
