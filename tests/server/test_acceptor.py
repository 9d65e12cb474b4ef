"""How the servers accept: as many connections as there are open files for, by TLS where there is a certificate."""

from __future__ import annotations

import asyncio
import logging
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.server import http_protocol, open_files, server
from sidecar.server.certificate import Certificate, new_certificate
from sidecar.server.listeners import listening
from sidecar.server.server import End, Server, run
from tests.support.certificates import needs_openssl, self_signed
from tests.support.each import each
from tests.support.waiting import until
from tests.support.wire import get

pytestmark = pytest.mark.anyio

WITHIN_S = 60.0
LOOPS = [asyncio.run, run]
NAMES = {"ids": ["asyncio", "uvloop"]}
Run = Callable[[Coroutine[Any, Any, None]], None]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says whether the request came by TLS."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[int]:
    """A server's port."""
    with listening("127.0.0.1", 0) as listener:
        async with Server(app, listener, timeout_keep_alive=60, **settings).running(End()):
            yield listener.getsockname()[1]


async def asked(port: int, request: bytes = get("/"), **more: Any) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), WITHIN_S)
    finally:
        writer.close()


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", None) == event]


@each("loop", LOOPS, **NAMES)
def test_at_the_limit_a_connection_waits_and_is_served_when_another_ends(
    loop: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with served(most=4) as port:
            idle = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(4)]
            await until(lambda: said(caplog, "open_files"))
            waiting = asyncio.ensure_future(asked(port))
            await asyncio.wait((waiting,), timeout=0.2)
            assert not waiting.done()
            idle.pop().close()
            assert (await waiting).startswith(b"HTTP/1.1 200 ")
            for writer in idle:
                writer.close()

    loop(main())
    (line,) = said(caplog, "open_files")  # although it was full twice
    caplog.clear()
    assert line.startswith("4 connections of clients are open")
    assert "LimitNOFILE" in line


@each("loop", LOOPS, **NAMES)
def test_without_a_file_left_a_connection_waits_and_is_not_closed(
    loop: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        async with served() as port:
            with socket.socket() as client, socket.socket() as next_free:
                client.setblocking(False)
                lowest = next_free.fileno()
                next_free.close()
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
                try:
                    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                    await until(lambda: said(caplog, "open_files"))
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                reader, writer = await asyncio.open_connection(sock=client)
                writer.write(get("/"))
                assert (await asyncio.wait_for(reader.read(), WITHIN_S)).startswith(b"HTTP/1.1 200 ")
                writer.close()

    loop(main())
    (line,) = said(caplog, "open_files")
    caplog.clear()
    assert line.startswith("Too many open files, with a limit of ")


def test_the_soft_limit_is_raised_to_the_hard_one_and_half_of_it_is_for_clients() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = open_files.WHERE_UNLIMITED if limits[1] == resource.RLIM_INFINITY else limits[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        assert open_files.raise_limit() == (512, most)
        assert open_files.raise_limit() is None
        assert open_files.limit() == most
        assert open_files.most_clients() == (most - open_files.OWN) // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# TLS


def trusting(authority: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@needs_openssl
@each("loop", LOOPS, **NAMES)
def test_clients_are_served_by_tls_and_by_nothing_else(
    loop: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "READ_ON_S", 0.05)
    files = self_signed(tmp_path)

    async def main() -> None:
        certificate = new_certificate(str(files.certificate), str(files.key))
        async with served(certificate=certificate, most=1) as port:
            with pytest.raises(ssl.SSLError):
                await asked(port, ssl=ssl.create_default_context())
            assert not (await asyncio.gather(asked(port), return_exceptions=True))[0]
            trusted = trusting(files.authority)  # none of those before holds one of `most`
            assert (await asked(port, ssl=trusted)).endswith(b"5\r\nhttps\r\n0\r\n\r\n")
            assert b'"code":"invalid_http"' in await asked(port, b"GET / HTTP/1.1\r\n\r\n", ssl=trusted)

    loop(main())


@needs_openssl
async def test_a_renewed_certificate_is_in_force_for_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (self_signed(made) for made in (tmp_path / "a", tmp_path / "b") if not made.mkdir())
    caplog.set_level(logging.INFO, "sidecar.serve")
    certificate = Certificate(str(first.certificate), str(first.key))

    async def is_trusted(authority: Path) -> bool:
        try:
            return (await asked(port, ssl=trusting(authority))).startswith(b"HTTP/1.1 200 ")
        except ssl.SSLError:
            return False

    authorities = [Path(shutil.copy(files.authority, tmp_path / name)) for name, files in (("1", first), ("2", second))]
    async with served(certificate=certificate) as port:
        assert [await is_trusted(one) for one in authorities] == [True, False]
        shutil.copy(second.certificate, first.certificate)
        certificate.look()  # the key is still to come
        assert said(caplog, "certificate_rejected") == []
        certificate.look()
        certificate.look()
        (rejected,) = said(caplog, "certificate_rejected")
        assert str(first.key) in rejected
        assert rejected.endswith("the certificate before stays in force")
        assert [await is_trusted(one) for one in authorities] == [True, False]
        shutil.copy(second.key, first.key)
        await until(lambda: said(caplog, "certificate_reloaded"))  # no one asks for a look
        assert [await is_trusted(one) for one in authorities] == [False, True]
        first.key.unlink()
        certificate.look()
        certificate.look()
        assert said(caplog, "certificate_rejected")[1].startswith(f"{first.key} cannot be read: No such file")
        assert await is_trusted(authorities[1])


@needs_openssl
def test_a_certificate_that_cannot_be_used_is_a_mistake_at_the_start(tmp_path: Path) -> None:
    files = self_signed(tmp_path)
    mistakes: list[tuple[str | None, str | None, str]] = [
        (None, str(files.key), "--tls-key is given without --tls-cert"),
        (str(tmp_path / "none"), None, "none cannot be read: No such file"),
        (str(tmp_path), None, "cannot be read: Is a directory"),
        (str(files.certificate), None, "are no certificate and its private key"),
        (str(files.key), str(files.certificate), "are no certificate and its private key"),
    ]
    for file, key_file, words in mistakes:
        with pytest.raises(ValueError, match=words):
            new_certificate(file, key_file)
    assert new_certificate(None, None) is None
    both = tmp_path / "both.pem"
    both.write_text(files.certificate.read_text() + files.key.read_text())
    assert new_certificate(str(both), None) is not None


@needs_openssl
def test_an_encrypted_key_is_not_asked_for_at_the_terminal(tmp_path: Path) -> None:
    files = self_signed(tmp_path)
    encrypted = tmp_path / "encrypted.pem"
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="is encrypted; write it without a password"):
        Certificate(str(files.certificate), str(encrypted))
