"""A certificate for loopback that no one but its own file vouches for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.redis_servers import Binary, RedisServer, TlsFiles

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")


def self_signed(folder: Path) -> TlsFiles:
    """Makes one in `folder`."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return TlsFiles(certificate, key, authority=certificate)


def started_with_tls(binary: Binary, folder: Path) -> RedisServer:
    """A server that speaks TLS; skips the test where its program cannot."""
    server = RedisServer(binary, folder, tls=self_signed(folder))
    try:
        server.start()
    except AssertionError as error:
        if "Failed finding TLS support" in str(error) or "Bad directive" in str(error):
            pytest.skip(f"this {binary.name} was built without TLS")
        raise
    return server
