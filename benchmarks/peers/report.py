"""Report of the peers: the text that is kept, and the table of docs/evidence.md, both made from one document."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from benchmarks.peers.cost import Cost, ratio
from benchmarks.peers.setting import Figure

NO_MEANS: Mapping[tuple[str, str], str] = {
    ("window", "smg"): "has none over HTTP",
    ("window", "dynamo"): "has none",
    ("window", "none"): "has none",
    ("killed", "dynamo"): "not played",
    ("killed", "none"): "not played",
}
"""What stands in the table where a peer is not played."""
SHOWN = (
    ("backlog", "interactive TTFT p95"),
    ("backlog", "all bulk answered after"),
    ("lending", "owner has its share after"),
    ("tokens", "most tokens at the engine"),
    ("window", "calls answered of 27"),
    ("killed", "its places in use again after"),
    ("overload", "interactive answered within the 60 s"),
    ("overload", "bulk answered within the 60 s"),
)
"""Figures of docs/evidence.md; the kept text has all."""
MOST_PER_REQUEST, MOST_PER_CHUNK = 1.5, 0.8
"""Asked of our proxy with admission, in SMG's microseconds."""

Document = dict[str, Any]


def empty(command: str) -> Document:
    """A document without results."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, CPython {platform.python_version()}; other work on the machine",
        "peers": {},
        "scenarios": {},
        "cost": {},
    }


def add(document: Document, scenario: str, title: str, found: Mapping[str, Sequence[Figure]]) -> None:
    """Adds one scenario's figures, by peer."""
    entry = document["scenarios"].setdefault(scenario, {"title": title, "figures": {}})
    entry["title"] = title
    for peer, figures in found.items():
        entry["figures"][peer] = [[one.name, str(one), one.value] for one in figures]


def add_cost(document: Document, found: Mapping[str, Cost], base: str) -> None:
    """Adds the cost of a request and of a chunk; `base` is the title that the others are compared with."""
    for title, cost in found.items():
        document["cost"][title] = {
            "request_us": statistics.median(cost.request_us),
            "chunk_us": statistics.median(cost.chunk_us),
            "of_smg_request": ratio(cost.request_us, found[base].request_us) if base in found else None,
            "of_smg_chunk": ratio(cost.chunk_us, found[base].chunk_us) if base in found else None,
            "rounds_request_us": [round(value) for value in cost.request_us],
            "rounds_chunk_us": [round(value, 1) for value in cost.chunk_us],
        }


def missed(document: Document, title: str) -> list[str]:
    """Targets of the cost that our proxy with admission misses."""
    own = document["cost"].get(title, {})
    pairs = [
        ("request", own.get("of_smg_request"), MOST_PER_REQUEST),
        ("chunk", own.get("of_smg_chunk"), MOST_PER_CHUNK),
    ]
    return [
        f"a {name} costs {value:.2f} times SMG's, at most {most} is asked"
        for name, value, most in pairs
        if value is not None and value > most
    ]


def _names(document: Document, scenario: str) -> list[str]:
    names: list[str] = []
    for figures in document["scenarios"][scenario]["figures"].values():
        names += [name for name, _, _ in figures if name not in names]
    return names


def _cell(document: Document, scenario: str, peer: str, name: str) -> str:
    figures = document["scenarios"][scenario]["figures"].get(peer)
    if figures is None:
        return NO_MEANS.get((scenario, peer), "not played")
    return next((text for own, text, _ in figures if own == name), "")


def text(document: Document) -> str:
    """The report that is kept."""
    peers: Mapping[str, str] = document["peers"]
    lines = [f"{document['command']}, {document['date']}, {document['machine']}", ""]
    lines += [f"{name:10}{title}" for name, title in peers.items()]
    for scenario, entry in document["scenarios"].items():
        lines += ["", f"{scenario}: {entry['title']}", f"{'':40}" + "".join(f"{name:>20}" for name in peers)]
        lines += [
            f"{name:40}" + "".join(f"{_cell(document, scenario, peer, name):>20}" for peer in peers)
            for name in _names(document, scenario)
        ]
    return "\n".join([*lines, *_cost_lines(document)]) + "\n"


def _cost_lines(document: Document) -> list[str]:
    if not document["cost"]:
        return []
    lines = ["", "cost: processor time of the gateway's processes, medians of interleaved rounds"]
    lines.append(f"{'':28}{'us a request':>14}{'of SMG':>10}{'us a chunk':>14}{'of SMG':>10}")
    for title, one in document["cost"].items():
        lines.append(
            f"{title:28}{one['request_us']:14,.0f}{_times(one['of_smg_request']):>10}"
            f"{one['chunk_us']:14,.1f}{_times(one['of_smg_chunk']):>10}"
        )
    lines.append(f"asked of our proxy with admission: at most {MOST_PER_REQUEST} and {MOST_PER_CHUNK} times SMG's")
    return lines


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def markdown(document: Document) -> str:
    """The table of docs/evidence.md: one figure of each scenario."""
    peers = list(document["peers"])
    lines = [
        "| figure | " + " | ".join(document["peers"][peer] for peer in peers) + " |",
        "|---|" + "---|" * len(peers),
    ]
    lines += [
        f"| {scenario}: {name} | " + " | ".join(_cell(document, scenario, peer, name) for peer in peers) + " |"
        for scenario, name in SHOWN
        if scenario in document["scenarios"]
    ]
    return "\n".join(lines) + "\n"
