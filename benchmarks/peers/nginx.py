"""nginx as a peer for the cost of a request: one worker that passes on, without buffering, over kept connections.

It is not installed: the one on the PATH is taken, or the one that NGINX names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.running import Command, free_ports, started
from benchmarks.peers.setting import Gateway, Peer, Setting

CONFIGURATION = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream engine {{ server {engine}; keepalive 64; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def program() -> str | None:
    """nginx, where there is one."""
    return os.environ.get("NGINX") or shutil.which("nginx")


def version() -> str:
    """Its version."""
    said = subprocess.run([program() or "nginx", "-v"], capture_output=True, text=True, check=True).stderr
    found = re.search(r"nginx/(\S+)", said)
    return found[1] if found else "unknown"


def passing(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """One nginx."""
    del setting
    [port] = free_ports(1)
    text = CONFIGURATION.format(folder=folder, port=port, engine=engine.removeprefix("http://"))
    (folder / "nginx.conf").write_text(text)
    line = [program() or "nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    return [started(running, Command(line, port, "/health", folder / "log.txt"))]


def mark(tier: str) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """It has no tiers."""
    del tier
    return {}, {}


def peer() -> Peer:
    """nginx, which must be there."""
    return Peer("nginx", "nginx", version(), passing, mark)
