"""Starter policy for several engines: their names, their capacities, and a pool for each model that they serve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from sidecar.policy.fields import EngineName, ModelName
from sidecar.policy.problems import printable
from sidecar.tools.doctor.recommendation import Recommendation
from sidecar.tools.doctor.survey import Survey

_FLOW = re.compile(r"^capacity: ")


def disagreement(urls: Sequence[str], reads: Sequence[Survey]) -> str | None:
    """Why one policy cannot have these engines; None where it can."""
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        return f"--upstream {printable(twice, 200)} is given twice; give each engine once"
    first = reads[0].engine
    for url, read in zip(urls, reads, strict=True):
        if read.engine is not first:
            return (
                f"{printable(url, 200)} is {read.engine.name}, and {printable(urls[0], 200)} is {first.name}: the "
                "engines of one policy are of one kind; write a policy for each kind"
            )
    return None


def engine_names(urls: Sequence[str]) -> list[str]:
    """A name for each address: the first part of its host where that tells them apart, else its place."""
    names = [_host_name(url) for url in urls]
    if None in names or len(set(names)) < len(names):
        return [f"engine-{place}" for place in range(1, len(urls) + 1)]
    return [str(name) for name in names]


def _host_name(url: str) -> str | None:
    host = urlsplit(url).hostname or ""
    try:
        ip_address(host)
    except ValueError:
        name = host.partition(".")[0]
    else:
        return None
    try:
        return str(TypeAdapter(EngineName).validate_python(name))
    except ValidationError:
        return None


def engines_by_model(names: Sequence[str], reads: Sequence[Survey]) -> Mapping[str, list[str]]:
    """The engines of each model, where they serve several; empty where they serve one, or do not say which."""
    found: dict[str, list[str]] = {}
    for name, read in zip(names, reads, strict=True):
        try:
            model = TypeAdapter(ModelName).validate_python(read.identity.model)
        except ValidationError:
            return {}
        found.setdefault(model, []).append(name)
    return found if len(found) > 1 else {}


def recommended_engines(
    urls: Sequence[str], names: Sequence[str], capacities: Sequence[Recommendation], models: Mapping[str, list[str]]
) -> Recommendation:
    """The policy's `engines`, and its `models` where there are several. `capacities` has one for each engine."""
    sizes = [_FLOW.sub("", one.yaml) for one in capacities]
    common = max(sizes, key=sizes.count)
    lines = ["engines:", "  static:"]
    for name, url, size in zip(names, urls, sizes, strict=True):
        own = "" if size == common else f", capacity: {size}"
        lines.append(f'    - {{name: "{name}", url: "{url}"{own}}}')
    lines.append(f"  capacity: {common}    # of each engine that writes none of its own")
    if models:
        lines.append("models:    # a pool for each, chosen by a request's model; another model gets a 404")
        lines += [f'  "{model}": {{engines: [{", ".join(engines)}]}}' for model, engines in models.items()]
    reasons = list(dict.fromkeys(one.reason for one in capacities))
    of_each = reasons[0] if len(reasons) == 1 else "as each of them reports"
    return Recommendation("\n".join(lines), f"the sum of {len(urls)} engines; {of_each}")
