"""`sidecar replay` as a user runs it, against every engine's emulator on real sockets, alone and behind the sidecar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from sidecar import AdmissionMiddleware
from sidecar.engines import Engine
from sidecar.policy.tenant_keys import hash_line
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.tools.emulator.config import Scheduling
from tests.support.in_process import complaint, ran
from tests.support.serving import serving
from tests.tools.emulator.emulated import ENGINES, SGLANG, TRTLLM, VLLM, emulated

pytestmark = pytest.mark.anyio
REAL = Path(__file__).parents[1] / "tools" / "replay" / "traces"
TIERS = ["high", "normal", "batch"]
POLICY = """
engine: vllm
capacity: {requests: 2, tokens: 100k}
tiers:
  high: {}
  normal: {}
  batch: {}
default_tier: batch
anonymous: high
sources: [header, key]
tenants: tenants/*.yaml
"""
TENANT = """
tenant: %s
keys: ["%s"]
tier: %s
max_tier: high
"""


async def replay(*arguments: object, code: int = 0) -> tuple[str, str]:
    """What the command prints, in a thread of its own: it runs an event loop."""
    ended = await asyncio.to_thread(ran, "replay", *map(str, arguments))
    assert ended.returncode == code, ended.stderr
    return ended.stdout, ended.stderr


def runs_of(path: Path) -> dict[str, Any]:
    return {run["name"]: run for run in json.loads(path.read_bytes())["runs"]}


@pytest.mark.parametrize("engine", ENGINES)
async def test_priority_is_seen_to_work_on_every_engine_and_the_control_shows_none(
    engine: type[Engine], tmp_path: Path
) -> None:
    figures, lines = tmp_path / "figures.json", tmp_path / "requests.jsonl"
    async with emulated(engine, slots=2, step_s=0.002) as client:
        out, error = await replay(
            "burst:90:20:4", "--upstream", client.url, "--by", "priority", "--control",
            "--json", str(figures), "--requests", str(lines),
        )  # fmt: skip
        sizes = {(line.priority is None) for line in client.engine.log}
    assert "answered    90  under way     0" in error
    assert f"({engine.name}, model emulated)" in out
    assert "high 30, normal 30, batch 30; prompt tokens by 4 bytes a token (no tokenizer at hand); seed 1" in out
    assert "the more important a request, the sooner its first token." in out
    assert "importance made no difference that these requests can show." in out
    assert sizes == {True, False}

    found = runs_of(figures)
    assert list(found) == ["replay", "control"]
    for run in found.values():
        assert (run["requests"], run["failed"], run["errors"], list(run["tiers"])) == (90, 0, {}, TIERS)
        assert run["prompt_tokens_counted"] == run["prompt_tokens_asked"] == 20
        assert run["output_tokens_per_s"] == pytest.approx(sum(t["output_tokens_per_s"] for t in run["tiers"].values()))
    by_tier = found["replay"]["tiers"]
    assert found["replay"]["correlation"]["high"] < -0.7
    assert by_tier["high"]["ttft_s"]["p50"] < by_tier["normal"]["ttft_s"]["p50"] < by_tier["batch"]["ttft_s"]["p50"]
    assert by_tier["batch"]["starvation_s"]["p50"] > 0.02
    assert by_tier["high"]["starvation_s"]["p50"] < 0.01
    assert by_tier["high"]["queue_wait_s"] is None
    control = found["control"]["correlation"]
    assert control["low"] < 0 < control["high"]
    reported = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(reported) == 180
    assert {(line["run"], line["tier"]) for line in reported} == {(run, tier) for run in found for tier in TIERS}
    assert all(line["output_tokens"] == 4 and line["error"] is None and line["status"] == 200 for line in reported)


async def test_first_come_first_served_is_seen_to_be_that() -> None:
    async with emulated(VLLM, slots=2, step_s=0.004, scheduling=Scheduling.FCFS) as client:
        out, _ = await replay("burst:60:20:3", "--upstream", client.url, "--by", "priority")
    assert "importance made no difference that these requests can show." in out


async def test_the_wrong_way_round_is_said_so() -> None:
    """SGLang's values at vLLM: what people get who do not know that the directions differ."""
    async with emulated(VLLM, slots=2, step_s=0.004) as client:
        arguments = ("burst:60:20:3", "--upstream", client.url, "--by", "priority", "--engine", "sglang")
        out, _ = await replay(*arguments)
    assert "the wrong way round, the more important a request, the LATER its first token." in out


@asynccontextmanager
async def sidecar(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Admission of two at once before an engine that serves first come, first served; a key for every tier.

    Gives the address of the sidecar, and that of such an engine without one.
    """
    (folder / "tenants").mkdir()
    (folder / "policy.yaml").write_text(POLICY)
    for tier in TIERS:
        (folder / "tenants" / f"{tier}.yaml").write_text(TENANT % (tier, hash_line(f"sk-{tier}"), tier))
    config = EmulatorConfig(engine=VLLM, scheduling=Scheduling.FCFS, steps=StepModel(max_sequences=2, step_us=6_000))
    mounted = AdmissionMiddleware(Emulator(config).app, folder)
    async with serving(mounted) as served, serving(Emulator(config).app) as engine:
        yield served.url, engine.url


@pytest.mark.parametrize("by", ["tier", "key"])
async def test_behind_the_sidecar_the_wait_is_reported_and_the_order_holds(by: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    keys = [argument for tier in TIERS for argument in ("--key", f"{tier}=sk-{tier}")] if by == "key" else []
    async with sidecar(tmp_path) as (url, engine):
        out, _ = await replay(
            "burst:60:20:4", "--upstream", f"{url}/v1/", "--by", by, "--policy", str(tmp_path),
            "--control-upstream", f"{engine}/v1", "--json", str(figures), *keys,
        )  # fmt: skip
    assert "sk-" not in out
    found = runs_of(figures)
    tiers = found["replay"]["tiers"]
    assert found["replay"]["correlation"]["high"] < -0.7
    assert tiers["high"]["queue_wait_s"]["p50"] < tiers["normal"]["queue_wait_s"]["p50"]
    waited_s, ttft_s = (tiers["batch"][figure]["p50"] for figure in ("queue_wait_s", "ttft_s"))
    assert ttft_s / 2 < waited_s <= ttft_s  # the rest is what a busy machine takes for an answer
    assert found["control"]["correlation"]["low"] < 0 < found["control"]["correlation"]["high"]


async def test_the_control_has_the_same_arrivals_in_other_words() -> None:
    """An engine with a prefix cache would serve the same words faster the second time."""
    prompts: list[str] = []
    emulator = Emulator(EmulatorConfig(engine=VLLM))

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            message = await receive()
            if scope.get("path") == "/v1/chat/completions" and message.get("body"):
                prompts.append(json.loads(message["body"])["messages"][0]["content"])
            return message

        await emulator.app(scope, heard, send)

    async with serving(listening) as served:
        await replay("burst:5:30:1", "--upstream", served.url, "--control")
    assert len(prompts) == 10
    assert {len(prompt) for prompt in prompts} == {120}
    assert len({prompt[:64] for prompt in prompts}) == 10


async def test_real_traces_are_played_fast_and_small(tmp_path: Path) -> None:
    async with emulated(TRTLLM, slots=16) as client:
        for name, arguments in (("mooncake", ("--speed", "20")), ("azure", ("--speed", "100", "--completions"))):
            file = str(REAL / f"{name}.{'jsonl' if name == 'mooncake' else 'csv'}")
            small = ("--scale", "0.01", "--max-output", "3", "--limit", "40", "--mix", "high=25,batch=75%")
            out, _ = await replay(file, "--upstream", client.url, *small, *arguments)
            assert "40 requests within" in out
            assert "high 10, batch 30" in out
            assert ("timestamps spread by chance over the 3 s" in out) == (name == "mooncake")
        assert len(client.engine.log) == 80


async def test_failed_requests_are_exit_code_1_with_their_number_and_the_first_error(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    async with emulated(SGLANG, slots=1, max_queued=2) as client:
        out, error = await replay("burst:20:8:4", "--upstream", client.url, "--json", figures, code=1)
    run = runs_of(figures)["replay"]
    assert run["errors"] == {"503: The request queue is full.": run["failed"]}
    assert error.splitlines()[-1] == (
        f"sidecar replay: {run['failed']} of 20 requests failed: 503: The request queue is full."
    )
    assert f"{run['failed']} x 503: The request queue is full." in out
    assert sum(tier["failed"] for tier in run["tiers"].values()) == run["failed"] > 10


async def test_requests_that_are_too_long_are_said_to_be_before_and_after() -> None:
    async with emulated(VLLM, context_tokens=50) as client:
        out, _ = await replay("burst:3", "--upstream", client.url, code=1)
    assert "3 requests do not fit the model's context of 50 tokens and will fail" in out
    assert "cut them with --max-input and --max-output, or --scale." in out


async def test_json_on_standard_output_is_alone_there() -> None:
    async with emulated(VLLM, slots=4) as client:
        out, error = await replay("burst:4:8:2", "--upstream", client.url, "--json", "-")
    assert json.loads(out)["runs"][0]["requests"] == 4
    assert "requests at once to" in error


async def test_a_server_that_says_nothing_useful_is_said_so() -> None:
    _, error = await replay("burst:3", "--upstream", "127.0.0.1:9", code=1)
    assert "http://127.0.0.1:9 cannot be reached: " in error
    async with serving(Starlette(), lifespan="off") as served:
        _, error = await replay("burst:3", "--upstream", served.url, code=1)
    assert "/v1/models answers 404" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mix", "high"], "'high' is no part of a mix; write high=20,normal=50,batch=30"),
        (["--mix", "high=1,high=2"], "'high=2' is no part of a mix"),
        (["--mix", "high=nan"], "'high=nan' is no part of a mix"),
        (["--mix", "high=1e308,batch=1e308"], "'high=1e308' is no part of a mix"),
        (["--mix", "high=0"], "'high=0' leaves nothing to send"),
        (["--key", "sk-secret"], "argument --key: write TIER=KEY, such as high=sk-demo"),
        (["--speed", "0"], "'0' is no time or factor; write a number that is more than 0, up to"),
        (["--limit", "0"], "'0' is no number of rows or tokens; write a number from 1 to"),
        (["--timeout", "1e9"], "'1e9' is no time in seconds; write a number that is more than 0, up to 86,400"),
        (["--jitter", "inf"], "'inf' is no spread in seconds; write a number from 0 on, up to 86,400"),
        (["--engine", "vlm"], "argument --engine: invalid choice: 'vlm'"),
        (["--by", "rank"], "argument --by: "),
        (["--upstream", "ftp://x"], "'ftp://x' is no server's address"),
    ],
)
def test_a_command_line_that_is_wrong_is_said_so(arguments: Sequence[str], said: str) -> None:
    error = complaint("replay", "burst", "--upstream", "http://127.0.0.1:9", *arguments, code=2)
    assert said in error
    assert "secret" not in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl"], "missing.jsonl: cannot be read (No such file or directory)"),
        (["burst:0"], "burst:0: write burst:REQUESTS"),
        (
            ["burst", "--by", "key", "--key", "high=1"],
            "sidecar replay: --by key: tier normal has no key; add --key ",
        ),
        (["burst", "--policy", "missing"], "missing"),
    ],
)
def test_what_cannot_be_played_is_exit_code_2_before_anything_is_sent(arguments: Sequence[str], said: str) -> None:
    assert said in complaint("replay", *arguments, "--upstream", "http://127.0.0.1:9", code=2)


async def test_the_engines_own_priority_needs_an_engine() -> None:
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "m", "owned_by": "somebody"}]})

    async with serving(Starlette(routes=[Route("/v1/models", models)]), lifespan="off") as served:
        _, error = await replay("burst:3", "--upstream", served.url, "--by", "priority", code=2)
    assert "the server does not say which engine it is; add --engine" in error
