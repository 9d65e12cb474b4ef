"""An engine that is rude on purpose: what a client sees on the wire, how often, and what the engine itself has done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import aiohttp
import pytest

from sidecar.cli import main
from sidecar.engines import Sglang, Vllm
from sidecar.tools.emulator.faults import Fault, read_fault
from tests.tools.emulator.emulated import Client, emulated

pytestmark = pytest.mark.anyio

BODY = {"prompt": "x", "max_tokens": 4}


@asynccontextmanager
async def rude(*faults: dict[str, Any]) -> AsyncIterator[Client]:
    """An engine that is asked for them while it runs."""
    async with emulated(Vllm, slots=4) as client:
        async with client.session.post(f"{client.url}/_emulator/faults", json=list(faults)) as response:
            assert response.status == 200, await response.text()
        yield client


async def ask(client: Client, **fields: Any) -> tuple[int, Any]:
    async with client.session.post(f"{client.url}/v1/completions", json={**BODY, **fields}) as response:
        return response.status, response.headers.get("retry-after")


async def statuses(client: Client, count: int) -> list[int]:
    return [(await ask(client))[0] for _ in range(count)]


async def done(client: Client) -> Any:
    async with client.session.get(f"{client.url}/_emulator/faults") as response:
        return (await response.json())["done"]


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize("after", [None, 7, "Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_a_refusal_has_the_status_and_the_retry_after_that_were_asked_for(status: int, after: Any) -> None:
    async with rude({"kind": "refuse", "status": status, "retry_after": after}) as client:
        assert await ask(client) == (status, None if after is None else str(after))
        assert client.engine.occupancy.most_requests == 0


async def test_every_nth_request_is_refused_and_no_other() -> None:
    async with rude({"kind": "refuse", "every": 3}) as client:
        assert await statuses(client, 7) == [200, 200, 503, 200, 200, 503, 200]
        assert await done(client) == {"refuse": 2}


async def test_a_time_ends_a_fault() -> None:
    async with rude({"kind": "refuse", "for_s": 0.3}) as client:
        assert await statuses(client, 1) == [503]
        await asyncio.sleep(0.35)
        assert await statuses(client, 1) == [200]


async def test_the_first_fault_that_applies_is_done() -> None:
    faults = {"kind": "refuse", "status": 429, "every": 2}, {"kind": "refuse", "status": 503}
    async with rude(*faults) as client:
        assert await statuses(client, 4) == [503, 429, 503, 429]


async def test_delete_ends_all_faults() -> None:
    async with rude({"kind": "refuse"}) as client:
        async with client.session.delete(f"{client.url}/_emulator/faults") as response:
            assert (await response.json())["active"] == []
        assert await statuses(client, 1) == [200]


async def test_a_reset_comes_without_a_byte_and_nothing_is_computed() -> None:
    async with rude({"kind": "reset"}) as client:
        assert await wire(client) == (b"", ConnectionResetError)
        assert client.engine.occupancy.most_requests == 0


async def test_a_cut_comes_after_the_first_token_and_the_engine_aborts() -> None:
    async with rude({"kind": "cut"}) as client:
        received, ended = await wire(client, b'{"prompt": "x", "max_tokens": 100000, "stream": true}')
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"data:" in received
        assert b"[DONE]" not in received
        assert ended is ConnectionResetError
        await client.until(lambda engine: engine.aborted == 1)


async def test_a_cut_also_breaks_an_answer_that_does_not_stream() -> None:
    async with rude({"kind": "cut"}) as client:
        received, ended = await wire(client)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert ended is ConnectionResetError
        with pytest.raises(aiohttp.ClientError):
            async with client.session.post(f"{client.url}/v1/completions", json=BODY) as response:
                await response.read()


async def test_a_silent_engine_says_nothing_until_the_client_leaves() -> None:
    async with rude({"kind": "silent", "count": 1}) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(client), 0.3)
        assert await statuses(client, 1) == [200]


async def test_slow_headers_are_late_while_the_engine_computes() -> None:
    async with rude({"kind": "slow_headers", "delay_s": 0.4}) as client:
        begun_s = time.monotonic()
        asked = asyncio.create_task(ask(client))
        await client.until(lambda engine: engine.finished == 1)
        assert not asked.done()
        assert (await asked)[0] == 200
        assert time.monotonic() - begun_s >= 0.4


async def test_pages_stay_well_unless_they_are_asked_for() -> None:
    async with rude({"kind": "refuse"}) as client, client.session.get(f"{client.url}/health") as response:
        assert response.status == 200
    async with rude({"kind": "refuse", "pages": True}) as client:
        async with client.session.get(f"{client.url}/health") as response:
            assert response.status == 503
        async with client.session.get(f"{client.url}/_emulator") as response:
            assert response.status == 200


async def test_the_page_shows_what_is_set_and_what_was_done() -> None:
    async with rude({"kind": "refuse", "retry_after": 2, "count": 5}) as client:
        await statuses(client, 3)
        async with client.session.get(f"{client.url}/_emulator/faults") as response:
            assert await response.json() == {
                "active": [{"kind": "refuse", "retry_after": 2, "count": 5, "done": 3}],
                "done": {"refuse": 3},
            }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[{", "truncated"),
        (b'{"kind": "refuse"}', "Expected `array`"),
        (b'[{"kind": "sulk"}]', "Invalid enum value 'sulk'"),
        (b'[{"kind": "refuse", "stauts": 503}]', "unknown field `stauts`"),
        (b'[{"kind": "refuse", "status": 200}]', "status must be between 400 and 599"),
        (b'[{"kind": "refuse", "every": 0}]', "every and count must be at least 1"),
        (b'[{"kind": "refuse", "retry_after": "a\\r\\nb: c"}]', "retry_after must be printable"),
    ],
)
async def test_a_mistake_is_explained_and_changes_nothing(body: bytes, said: str) -> None:
    async with rude({"kind": "refuse", "status": 529}) as client:
        async with client.session.post(f"{client.url}/_emulator/faults", data=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert said in error
        assert '[{"kind": "refuse"' in error
        assert (await ask(client))[0] == 529


async def test_faults_can_be_set_before_the_start() -> None:
    async with emulated(Sglang, faults=(read_fault("refuse,status=429,retry_after=2,every=2"),)) as client:
        assert await ask(client) == (200, None)
        assert await ask(client) == (429, "2")


@pytest.mark.parametrize("text", ["", "refuse,429", "refuse,status=many", "refuse,every=0", "sulk"])
def test_a_mistake_on_the_command_line_is_explained(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["emulate", "--engine", "vllm", "--port", "0", "--fault", text])
    assert ended.value.code == 2
    assert "refuse,status=429,every=10" in capsys.readouterr().err


def test_the_documentation_has_every_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    kinds = get_args(get_type_hints(Fault)["kind"])
    assert len(kinds) == 5
    for kind in kinds:
        assert f"| `{kind}` |" in page


async def wire(
    client: Client, body: bytes = b'{"prompt": "x", "max_tokens": 4}'
) -> tuple[bytes, type[Exception] | None]:
    """The bytes of the answer on a connection of its own, and the error that ended it."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    received = b""
    try:
        while part := await reader.read(65536):
            received += part
    except ConnectionResetError:
        return received, ConnectionResetError
    finally:
        writer.close()
    return received, None
