"""The users of a tenant over HTTP: they take turns, each has limits, and only those who may see them do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.cli import main
from sidecar.composition.serving import new_proxy
from sidecar.engines import ENGINES
from sidecar.events import Classified
from sidecar.identity.users import find_user
from sidecar.policy.model import Policy
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.support.each import each
from tests.support.late import anthropic, openai
from tests.support.middleware import CHAT, KEYS, App, chat, guarding, key, policy, write_policy
from tests.support.serving import serving

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "hello"}]
ONE_EACH = "users: {limits: {requests_per_minute: 1}}\n"


def hashed(name: str, with_policy: Policy) -> str:
    found = find_user(with_policy.named["acme"], {b"x-user-id": name.encode()}, b"{}")
    assert found is not None
    return found.key


@asynccontextmanager
async def an_engine(written: Policy) -> AsyncIterator[str]:
    """The address of `sidecar serve`'s proxy before an emulated engine."""
    async with serving(Emulator(EmulatorConfig(engine=ENGINES["vllm"], steps=StepModel(step_us=100))).app) as upstream:
        sidecar = AdmissionMiddleware(new_proxy(upstream.url, written), written)
        async with serving(sidecar, http=BoundedHttpProtocol) as served:
            yield served.url


async def test_openais_client_names_its_user_in_either_field_and_each_has_limits_of_its_own() -> None:
    written = policy(acme=ONE_EACH, engine="vllm")
    async with (
        an_engine(written) as url,
        openai.AsyncOpenAI(api_key=KEYS["acme"], base_url=f"{url}/v1", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        asked: Any = {"model": "m", "messages": HELLO, "max_tokens": 5}
        assert (await create(**asked, user="ann")).choices[0].finish_reason == "length"
        with pytest.raises(openai.RateLimitError) as refused:
            await create(**asked, safety_identifier="ann")
        ann = hashed("ann", written)
        assert f"tenant acme (user {ann}) is over its limit of 1 requests per minute" in refused.value.message
        assert 50 < float(refused.value.response.headers["retry-after"]) <= 60
        assert (await create(**asked, safety_identifier="bob")).choices[0].finish_reason == "length"
        assert (await client.responses.create(model="m", input="hello", safety_identifier="eve")).id
        assert (await create(**asked)).choices[0].finish_reason == "length"
        with pytest.raises(openai.RateLimitError, match="user unknown"):
            await create(**asked, user="")
        assert (await create(**asked, user="unknown")).choices[0].finish_reason == "length"


@pytest.mark.long  # its import takes a second
async def test_anthropics_client_names_its_user_in_the_metadata() -> None:
    written = policy(acme=ONE_EACH, engine="vllm")
    async with (
        an_engine(written) as url,
        anthropic.AsyncAnthropic(api_key=KEYS["acme"], base_url=url, max_retries=0) as client,
    ):
        asked: Any = {"model": "m", "messages": HELLO, "max_tokens": 5}
        await client.messages.create(**asked, metadata={"user_id": "ann"})
        with pytest.raises(anthropic.RateLimitError, match=f"user {hashed('ann', written)}"):
            await client.messages.create(**asked, metadata={"user_id": "ann"})
        await client.messages.create(**asked, metadata={"user_id": "bob"})


@each(
    ("users", "served"),
    [("{}", "f0 f1 g0 h0 f2 f3"), ("{fair: false, limits: {burst: 1s, concurrent_requests: 9}}", "f0 f1 f2 f3 g0 h0")],
)
async def test_who_floods_waits_for_itself(users: str, served: str) -> None:
    app = App(is_held=True)
    async with guarding(app, policy(requests="1", acme=f"users: {users}\n")) as guarded:
        names = ["f0", "f1", "f2", "f3", "g0", "h0"]
        asked = []
        for number, name in enumerate(names):
            body = {**chat(), "user": name[0], "seed": name}
            asked.append(asyncio.create_task(guarded.ask(body, key("acme"))))
            await guarded.until(leases=1, waiting=number)
        app.release(len(names))
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        assert [json.loads(seen.body)["seed"] for seen in app.seen] == served.split()


async def test_a_user_with_fewer_in_a_full_queue_takes_the_newest_place_of_the_one_with_most() -> None:
    app = App(is_held=True)
    full = policy(requests="1", of_normal=", max_requests: 3", acme="users: {}\n")
    async with guarding(app, full) as guarded:
        flood = []
        for number in range(4):
            flood.append(asyncio.create_task(guarded.ask({**chat(), "user": "f"}, key("acme"))))
            await guarded.until(leases=1, waiting=number)
        small = asyncio.create_task(guarded.ask({**chat(), "user": "g"}, key("acme")))
        assert (await flood[-1]).status == 503
        assert (await guarded.ask({**chat(), "user": "f"}, key("acme"))).status == 503
        app.release(4)
        assert [(await task).status for task in (small, *flood[:3])] == [200] * 4


@each(("shown", "seen"), [("hashed", None), ("plain", "ann")])
async def test_who_asked_is_in_the_record_of_the_request(shown: str, seen: str | None) -> None:
    written = policy(acme=f"users: {{shown: {shown}}}\n")
    async with guarding(App(), written) as guarded:
        await guarded.ask({**chat(), "user": "ann"}, key("acme"))
        await guarded.ask(chat(), key("acme"))
        await guarded.ask({**chat(), "user": "ann"}, key("nightly"))
        await guarded.until(stories=3)
        users = [story.one(Classified).user for story in guarded.recorder.stories]
    assert users == [seen or hashed("ann", written), "", None]


def test_explain_shows_the_user_of_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_policy(tmp_path, acme="users: {shown: plain}\n")
    ask = ["explain", str(path), "--path", CHAT, "--key", KEYS["acme"]]
    assert main([*ask, "--header", "x-user-id: ann"]) == 0
    assert "   user: ann\n" in capsys.readouterr().out
    assert main(ask) == 0
    assert "   user: none is named\n" in capsys.readouterr().out
