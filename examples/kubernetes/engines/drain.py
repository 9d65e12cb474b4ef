"""The preStop hook of an engine's pod: every sidecar drains the engine, and the hook ends when its last answer is out.

It runs in the engine's own container, whatever engine that is: with `python3` and its standard library alone.

POD_IP and ENGINE_PORT are the engine's name, DRAIN_AT the sidecars' admin ports (`host:port`, separated by commas; each
address of a host is a sidecar), DRAIN_WITHIN_S the most seconds that it takes. Exit codes: 0 the engine is empty; 1 it
may not be, and standard error says why, which Kubernetes shows as an event of the pod.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

AGAIN_S = 0.5
NO_PROXY = build_opener(ProxyHandler({}))
"""A proxy for downloads is none for the sidecars."""


def bracketed(address: str) -> str:
    """An address as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def sidecars() -> list[str]:
    """The admin port of each sidecar. Empty where none is there: then no one sends this engine a request."""
    found = []
    for place in os.environ["DRAIN_AT"].split(","):
        host, _, port = place.strip().rpartition(":")
        try:
            addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except OSError as error:
            print(f"drain: {host}: {error}", file=sys.stderr)
            addresses = set()
        found += [f"{bracketed(address)}:{port}" for address in sorted(addresses)]
    return found


def drained(sidecar: str, ends_s: float) -> str | None:
    """Drains the engine at one sidecar. Returns why it may not be empty; None where it is."""
    engine = f"{bracketed(os.environ['POD_IP'])}:{os.environ['ENGINE_PORT']}"
    token = os.environ.get("SIDECAR_ADMIN_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url, trouble = f"http://{sidecar}/engines/{quote(engine, safe='')}/drain?wait=true", "no time was left"
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            NO_PROXY.open(Request(url, method="POST", headers=headers), timeout=left_s).close()
        except HTTPError as answer:
            with answer:
                trouble = f"{answer.code} {answer.read().decode(errors='replace')}"
            if answer.code == 404:  # it does not know this engine, so it has no request there
                return None
            if answer.code != 503:  # 503: the sidecar is ending, and may have requests here until it has ended
                break
        except OSError as error:
            trouble = str(error)
            if sidecar not in sidecars():  # it has ended
                return None
        else:
            return None
        time.sleep(AGAIN_S)
    return f"drain: {sidecar}: {trouble}"


def main() -> int:
    """Drains the engine at every sidecar at once. See the module for the exit codes."""
    ends_s = time.monotonic() + float(os.environ["DRAIN_WITHIN_S"])
    with ThreadPoolExecutor() as threads:
        troubles = [trouble for trouble in threads.map(lambda each: drained(each, ends_s), sidecars()) if trouble]
    for trouble in troubles:
        print(trouble, file=sys.stderr)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
