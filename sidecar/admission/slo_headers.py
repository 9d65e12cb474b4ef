"""Headers by which a client loosens its tier's objective: milliseconds to the first token, and for each later one.

`x-slo-ttft-ms` and `x-slo-tpot-ms` are those of the Gateway API inference extension; llm-d calls them
`x-llm-d-slo-ttft-ms` and `x-llm-d-slo-tpot-ms`, and keeps the others as aliases. Of both the newer name counts, as
there. A client may be content with longer times than its tier promises. A shorter one would take gain from others who
said nothing: it does not count, and neither does a value that is no number of milliseconds. Both are reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sidecar.gain.token_deadlines import Objective

TTFT_HEADERS = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
TPOT_HEADERS = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
SLO_HEADERS = (*TTFT_HEADERS, *TPOT_HEADERS)
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,6})?").fullmatch
"""At most eleven days. A longer one is no objective, and its sums would be no whole numbers that JSON has."""


def asked_slo(headers: Mapping[bytes, bytes], objective: Objective) -> tuple[Objective, list[str]]:
    """The tier's objective as the client loosens it, and the names of the headers that do not count."""
    ignored: list[str] = []
    ttft_us = _asked_us(headers, TTFT_HEADERS, objective.ttft_us, ignored)
    tpot_us = _asked_us(headers, TPOT_HEADERS, objective.tpot_us, ignored)
    return objective.loosened(ttft_us, tpot_us), ignored


def _asked_us(headers: Mapping[bytes, bytes], names: tuple[bytes, ...], promised_us: int, ignored: list[str]) -> int:
    found = 0
    for name in names:
        raw = headers.get(name)
        if raw is None:
            continue
        asked_us = _us(raw)
        if asked_us is None or asked_us < promised_us or found:
            ignored.append(name.decode("ascii"))
        else:
            found = asked_us
    return found


def _us(raw: bytes) -> int | None:
    raw = raw.strip()
    return round(float(raw) * 1000) if _MILLISECONDS(raw) else None
