"""Processes of an example on this machine: what they are asked, and what they answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.examples.command_lines import replaced
from tests.support.commands import address, command
from tests.support.http import fetch

TIMEOUT_S = 30.0
"""For an answer, and for what a test waits for: both take a second, on a machine that has nothing else to do."""


@dataclass(frozen=True)
class Sidecar:
    """A running `sidecar serve`: where clients and where operators reach it, and its process."""

    url: str
    admin: str
    process: Any

    @property
    def port(self) -> int:
        """The clients' port."""
        return int(self.url.rpartition(":")[2])

    @property
    def admin_port(self) -> int:
        """The operators' port."""
        return int(self.admin.rpartition(":")[2])

    def page(self, path: str) -> Any:
        """An admin page in JSON, whatever its status."""
        return json.loads(fetched(self.admin + path)[1])


@contextmanager
def sidecars(words: Sequence[str], upstream: str, policy: object, **variables: str) -> Iterator[Sidecar]:
    """Runs a `serve` command line as it is written, but for the engine, the policy's place and the ports."""
    here = {"--upstream": upstream, "--policy": str(policy), "--host": "127.0.0.1", "--admin-host": "127.0.0.1"}
    with command(*replaced(words, {**here, "--port": 0, "--admin-port": 0}), **variables) as process:
        yield Sidecar(address(process), address(process), process)


@contextmanager
def emulator(engine: str, *more: str) -> Iterator[str]:
    """An emulated engine; gives its address."""
    with command("emulate", f"--engine={engine}", "--port=0", *more) as process:
        yield address(process)


def fetched(url: str) -> tuple[int, str]:
    """The status and the text of a page."""
    answer = fetch(url, within_s=TIMEOUT_S)
    return answer.status, answer.text


def asked(url: str, key: str | None, max_tokens: int = 2, timeout_s: float = TIMEOUT_S) -> int:
    """The status of the answer to a chat."""
    body = {"model": "emulated", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hello"}]}
    return fetch(f"{url}/v1/chat/completions", body, key=key, within_s=timeout_s).status


def in_the_background(url: str, key: str, max_tokens: int) -> threading.Thread:
    """The same, while the test goes on; however it ends."""

    def ask() -> None:
        with contextlib.suppress(OSError):  # the test is over, and the sidecar with it
            asked(url, key, max_tokens, timeout_s=60)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def with_key(tenant: str, key: str) -> str:
    """A tenant's file with this key in place of those in it."""
    head, _, rest = tenant.partition("keys:\n")
    _, _, tail = rest.partition("\n")
    return f'{head}keys:\n  - "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n{tail}'
