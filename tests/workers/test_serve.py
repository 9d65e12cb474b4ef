"""Several workers on one port: they share one pool, end together, and none is left behind.

What a command survives is in `test_restarts.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest

from tests.support.certificates import needs_openssl, self_signed
from tests.support.shared_pools import begun_store
from tests.workers.running import (
    WITHIN_S,
    both_have_some,
    children,
    draining,
    events,
    has_come,
    held_engine,
    is_running,
    serving,
    started,
    until,
    write_policy,
)

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has workers")]


async def test_two_workers_share_one_pool_and_one_port_and_drain_together(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=3), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        streams += [asyncio.ensure_future(command.stream()) for _ in range(6)]
        await until(lambda: has_come(command, len(streams)), "all have come: one still to come is refused")
        await until(lambda: engine.running == 3, "the pool is full")
        state = await command.page("/state")
        assert state["pool"]["capacity"]["requests"] == 3
        assert state["pool"]["store"]["replicas"] == 2
        assert sum(row["pool"]["store"]["own"]["leases"] for row in state["workers"]) == 3
        command.signal(signal.SIGTERM)
        await until(lambda: draining(command), "it drains")
        assert await command.ask() == 503
        engine.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
        code, log = await command.ended()
    assert [status for status, _ in answers] == [200] * len(streams)
    assert all(body.endswith(b"[DONE]\n\n") for _, body in answers)
    assert engine.most == 3
    assert code == 0
    drained = [json.loads(line)["worker"] for line in log.splitlines() if '"event": "draining"' in line]
    assert sorted(drained) == [1, 2]
    assert "Traceback" not in log


@pytest.mark.long
async def test_a_store_that_is_named_has_the_pool_and_no_other_is_started(tmp_path: Path) -> None:
    with begun_store(tmp_path) as store:
        async with (
            held_engine() as engine,
            serving(write_policy(tmp_path), engine.url, SIDECAR_STORE=store.url) as command,
        ):
            assert await command.ask() == 200
            assert children(command.process.pid) == set(await command.pids())
            assert any(str(key).startswith("ledger:{") for key in store.command("KEYS", "*"))
            command.signal(signal.SIGTERM)
            assert (await command.ended())[0] == 0


@pytest.mark.long
async def test_a_service_manager_that_signals_every_process_cuts_no_request_off(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=40), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        for pid in [*children(command.process.pid), command.process.pid]:
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(1)
        engine.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
        code, log = await command.ended()
    assert {status for status, _ in answers} == {200}
    assert code == 0
    assert "cut" not in events(log)
    assert "Traceback" not in log


@pytest.mark.long
async def test_a_signal_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("--upstream", "http://127.0.0.1:9", "--policy", str(write_policy(tmp_path)))
    async with started("--workers", "2", *arguments) as process:
        await until(lambda: len(children(process.pid)) == 3, "the store and both workers have begun")
        begun = children(process.pid)
        process.send_signal(signal.SIGTERM)
        said, errors = await asyncio.wait_for(process.communicate(), WITHIN_S)
        assert not any(map(is_running, begun))
    assert (process.returncode, said) == (0, b""), "it was not there yet"
    assert "Traceback" not in errors.decode()


@pytest.mark.long
async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path), engine.url) as command:
        stream = asyncio.ensure_future(command.stream())
        await until(lambda: engine.running == 1, "it streams")
        command.signal(signal.SIGTERM)
        await until(lambda: draining(command), "it drains")
        command.signal(signal.SIGINT)
        code, log = await asyncio.wait_for(command.ended(), WITHIN_S)
        with pytest.raises(aiohttp.ClientError):
            await stream
    assert code == 0
    assert "cut" in events(log)


@pytest.mark.long
async def test_a_supervisor_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # with a short path
        async with held_engine() as engine, serving(write_policy(tmp_path), engine.url, TMPDIR=folder) as command:
            stream = asyncio.ensure_future(command.stream())
            await until(lambda: engine.running == 1, "it streams")
            started = children(command.process.pid)
            assert len(started) == 3  # two workers and a store
            [own] = await asyncio.to_thread(lambda: [*Path(folder).glob("sidecar-workers-*")])
            assert own.stat().st_mode & 0o777 == 0o700
            command.signal(signal.SIGKILL)
            await until(lambda: not any(map(is_running, started)), "workers and store end")
            with pytest.raises(aiohttp.ClientError):
                await stream
            await until(lambda: engine.running == 0, "the engine is left alone")
            assert not own.exists()


async def test_a_worker_that_hangs_ends_without_its_supervisor(tmp_path: Path) -> None:
    hangs = (
        "import socket, threading, time; from sidecar.workers import worker; worker.ALONE_S = 1; "
        "worker.signal.signal(worker.CUT, lambda *_: None); "
        f"threading.Thread(target=worker._end_alone, args=(socket.socket(fileno=0), 'unix:{tmp_path}/own/a'), "
        "daemon=True).start(); print(flush=True); time.sleep(600)"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", hangs), stdin=theirs.fileno(), stdout=asyncio.subprocess.PIPE
        )
    await process.stdout.readline()
    ours.close()
    assert await asyncio.wait_for(process.wait(), WITHIN_S) == -signal.SIGALRM
    await process.communicate()


@pytest.mark.long
async def test_a_worker_that_cannot_be_kept_running_ends_the_command(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path), engine.url) as command:
        while command.process.returncode is None:
            try:
                for row in (await command.page("/state"))["workers"]:
                    if row["worker"] == 1 and row["state"] == "serving":
                        os.kill(row["pid"], signal.SIGKILL)
            except aiohttp.ClientError:
                break
            await asyncio.sleep(0.2)
        code, log = await command.ended()
    assert code == 1
    assert log.splitlines()[-1] == (
        "sidecar: worker 1 cannot be kept running: its process was killed by SIGKILL, as the times before"
    )
    assert events(log).count("worker_down") == 4


@pytest.mark.long
@needs_openssl
async def test_workers_share_a_unix_socket_and_a_certificate(tmp_path: Path) -> None:
    files, path = self_signed(tmp_path), tmp_path / "own.sock"
    ours = ("--listen", f"unix:{path}", "--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    policy = ("--policy", str(write_policy(tmp_path)), "--workers", "2")
    async with held_engine() as engine, started("--upstream", engine.url, *policy, *ours) as process:
        assert (
            await asyncio.wait_for(process.stdout.readline(), WITHIN_S)
        ).decode() == f"sidecar: proxy on unix:{path}\n"
        context = ssl.create_default_context(cafile=str(files.authority))
        for _ in range(20):
            reader, writer = await asyncio.open_unix_connection(path, ssl=context, server_hostname="127.0.0.1")
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), WITHIN_S)).startswith(b"HTTP/1.1 200 ")
            writer.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), WITHIN_S) == 0
    assert not path.exists()
