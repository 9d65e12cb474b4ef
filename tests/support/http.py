"""One request over HTTP, from a test that has no event loop."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fetched:
    """The answer, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Its body, decoded."""
        return self.body.decode()

    @property
    def json(self) -> Any:
        """Its body as JSON."""
        return json.loads(self.body)

    def total(self, metric: str) -> float:
        """The sum of a metric over its labels, of a page in the text format of Prometheus."""
        return sum(float(line.split()[-1]) for line in self.text.splitlines() if line.startswith(metric + "{"))


def fetch(
    url: str,
    body: object = None,
    *,
    key: str | None = None,
    method: str | None = None,
    within_s: float = 60.0,
    **headers: str,
) -> Fetched:
    """Asks a page, or sends `body` as JSON, with a tenant's key; a header's name has underscores. Follows redirects."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        sent["authorization"] = f"Bearer {key}"
    if body is not None:
        sent.setdefault("content-type", "application/json")
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent, method=method), timeout=within_s) as answer:
            return Fetched(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Fetched(error.code, error.headers, error.read())
