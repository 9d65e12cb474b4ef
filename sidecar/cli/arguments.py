"""Values of arguments, read for several commands."""

from __future__ import annotations

import argparse

from sidecar.policy import units


def duration_s(text: str) -> float:
    """A time such as 90s, in seconds. Raises ArgumentTypeError for what is none."""
    try:
        return float(units.duration_s(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
