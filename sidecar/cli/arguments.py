"""Values of arguments, read for several commands."""

from __future__ import annotations

import argparse
import sys
from urllib.parse import urlsplit

from sidecar.policy import units

_V1 = "/v1"
_LEFT_OUT = f"sidecar: the {_V1} at the end of the server's address is left out, because every path begins with it"


def duration_s(text: str) -> float:
    """A time such as 90s, in seconds. Raises ArgumentTypeError for what is none."""
    try:
        return float(units.duration_s(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def server_url(text: str) -> str:
    """A server's address, with a base path or without. Raises ArgumentTypeError for what is none.

    The `/v1` that OpenAI clients want at its end is left out, with a line on standard error.
    """
    from sidecar.tools.loadgen.connection import Target

    url = (text.strip() if "://" in text else f"http://{text.strip()}").rstrip("/")
    try:
        Target.of(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not urlsplit(url).path.endswith(_V1):
        return url
    print(_LEFT_OUT, file=sys.stderr)  # without the address, which may hold a password
    return url.removesuffix(_V1).rstrip("/")
