"""A sidecar whose upstream leads back to itself, as a process: it does not start, or each request ends at once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import address, command
from tests.support.fault_proxy import FaultProxy
from tests.support.http import fetch
from tests.support.middleware import write_policy
from tests.support.ports import free_ports

pytestmark = pytest.mark.anyio


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "listens", "which"),
    [("127.0.0.1", "127.0.0.1", 0), ("localhost", "0.0.0.0", 0), ("0.0.0.0", "127.0.0.1", 1)],
)
def test_serve_refuses_its_own_addresses_as_the_upstream(host: str, listens: str, which: int, tmp_path: Path) -> None:
    ports = free_ports(2)
    upstream = f"http://{host}:{ports + which}"
    write_policy(tmp_path)
    addresses = ("--host", listens, "--port", str(ports), "--admin-port", str(ports + 1))
    with command("serve", "--upstream", upstream, "--policy", str(tmp_path / "policy.yaml"), *addresses) as process:
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert f"sidecar: the upstream {upstream} is this sidecar itself; give the engine's address" in said


@pytest.mark.long
@pytest.mark.parametrize("mode", ["enforce", "observe"])
async def test_a_loop_through_another_server_ends_with_the_first_request_that_comes_back(
    mode: str, tmp_path: Path
) -> None:
    write_policy(tmp_path, more=f"mode: {mode}\n")
    port = free_ports(1)
    async with FaultProxy("127.0.0.1", port) as other_server:
        upstream = f"http://127.0.0.1:{other_server.port}"
        ours = ("--policy", str(tmp_path / "policy.yaml"), "--port", str(port), "--admin-port", "0")
        with command("serve", "--upstream", upstream, *ours, SIDECAR_ENGINE_CHECK="alive") as process:
            sidecar = await asyncio.to_thread(address, process)
            admin = await asyncio.to_thread(address, process)
            reason = f"the engine does not answer: {upstream} leads back to the sidecar that asks"
            for _ in range(200):
                readiness = await asyncio.to_thread(_asked, f"{admin}/readyz")
                said = readiness[1].get("reasons", []) + readiness[1].get("notices", [])
                if any(one.startswith(reason) for one in said):
                    break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError(readiness)
            status, answer = await asyncio.to_thread(_asked, f"{sidecar}/v1/models")
            assert (status, answer["error"]["code"]) == (508, "loop_detected")
            if mode == "observe":  # enforcing, the request waits until the engine is there
                status, answer = await asyncio.to_thread(_asked, f"{sidecar}/v1/completions", {"prompt": "a"})
                assert (status, answer["error"]["code"]) == (508, "loop_detected")
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 60


def _asked(url: str, body: object = None) -> tuple[int, Any]:
    answer = fetch(url, body)
    return answer.status, answer.json
