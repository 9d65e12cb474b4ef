"""The arguments of `sidecar replay`, and what each may be."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

from sidecar.load.connection import Target
from sidecar.policy.policy import EngineName
from sidecar.replay.asking import By

LONGEST_TIMEOUT_S = 24 * 3600.0


class _Keys(argparse.Action):
    """Collects `TIER=KEY`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, _: str | None = None
    ) -> None:
        tier, equals, key = str(values).partition("=")
        if not equals or not tier or not key or not key.isprintable():
            # What is wrong is not shown: it may be a key.
            parser.error("argument --key: write TIER=KEY, such as high=sk-demo")
        namespace.key = {**namespace.key, tier: key}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of them."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace's file, or burst, burst:N, burst:N:INPUT:OUTPUT")
    add("--upstream", required=True, action="append", type=server_url, metavar="URL",
        help="the server, such as http://127.0.0.1:8000; several get the requests by chance")  # fmt: skip
    _add_asking(parser.add_argument_group("tiers"))
    _add_sizing(parser.add_argument_group("what is sent"))
    output = parser.add_argument_group("output").add_argument
    output("--json", metavar="FILE", help="also write all figures as JSON, - for standard output")
    output("--report", metavar="FILE.html", help="also write a page with plots, which needs no network")
    output("--requests", metavar="FILE.jsonl", help="also write a line of JSON for each request")


def _add_asking(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--by", type=By, choices=list(By), default=By.TIER, metavar="priority|tier|key",
        help="how it asks: in the engine's own way, by the tier header (default), by its tier's key")  # fmt: skip
    add("--mix", type=mix, metavar="high=20,normal=50,batch=30",
        help="tiers of rows without one (default: all of the policy alike, else high, normal, batch)")  # fmt: skip
    add("--control", action="store_true", help="play it again with equal priorities, and show both")
    add("--policy", metavar="DIR", help="a policy file or folder: its tiers, tier header and tokenizer")
    add("--key", action=_Keys, default={}, metavar="TIER=KEY", help="a tier's API key, for --by key; repeated")
    add("--api-key", type=_header_value, metavar="KEY", help="the key that everybody sends otherwise")
    add("--engine", type=_engine, metavar="NAME",
        help=f"{', '.join(name.value for name in EngineName)} (default: what the server says it is)")  # fmt: skip


def _add_sizing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--limit", type=_count, metavar="N", help="only the first N rows")
    add("--duration", type=_positive, metavar="S", help="only what is sent within so many seconds")
    add("--speed", type=_positive, default=1.0, metavar="X", help="times faster than the trace (default 1)")
    add("--scale", type=_positive, default=1.0, metavar="X", help="multiply all lengths, e.g. 0.1 for a small model")
    add("--max-input", type=_count, metavar="TOKENS", help="cut longer prompts")
    add("--max-output", type=_count, metavar="TOKENS", help="cut longer answers")
    add("--jitter", type=_not_negative, metavar="S",
        help="send each later by up to this, by chance (default: what rounded times are rounded to)")  # fmt: skip
    add("--seed", type=int, default=1, help="of prompts, tiers and jitter (default %(default)s)")
    add("--model", metavar="NAME", help="the model to ask for (default: the server's first)")
    add("--completions", action="store_true", help="ask /v1/completions, not /v1/chat/completions")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json that counts prompts (default: the engine's own)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="have every answer as long as its row says (default: where the engine knows the field)")  # fmt: skip
    add("--timeout", type=_timeout, default=600.0, metavar="S", help="for one answer (default %(default)g)")


def server_url(text: str) -> str:
    """A server's address; the `/v1` that OpenAI clients want at its end is taken away."""
    url = re.sub(r"/v1/?$", "", text.strip()) if "://" in text else f"http://{text.strip()}"
    try:
        Target.of(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return url.rstrip("/")


def mix(text: str) -> Mapping[str, float]:
    """Weights by tier: `high=20,normal=50,batch=30`; percent signs are let by."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (piece.strip() for piece in part.partition("="))
        try:
            number = float(weight.removesuffix("%"))
        except ValueError:
            number = -1.0
        if not name or name in found or not 0 <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{part!r} is no part of a mix; write high=20,normal=50,batch=30")
        found[name] = number
    if sum(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} leaves nothing to send; write high=20,normal=50,batch=30")
    return {name: number for name, number in found.items() if number > 0}


def _engine(text: str) -> EngineName:
    try:
        return EngineName(text)
    except ValueError:
        names = ", ".join(name.value for name in EngineName)
        raise argparse.ArgumentTypeError(f"{text!r} is no engine that is known; write one of {names}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number


def _positive(text: str) -> float:
    number = _not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0")
    return number


def _timeout(text: str) -> float:
    number = _positive(text)
    if number > LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than a day; write seconds")
    return number


def _header_value(text: str) -> str:
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError("the key has a character that no header can hold")
    return text
