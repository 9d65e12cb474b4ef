"""Writes the tables of docs/http.md and docs/telemetry.md from the declarations: `python docs/tables.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from sidecar import errors
from sidecar.admin.operations import OPERATIONS, Operation, PageAnswer

DOCS = Path(__file__).parent
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def error_rows() -> Iterator[str]:
    """Every error: the first paragraph of its docstring says what happened."""
    yield "| status | code | what happened |"
    yield "|---|---|---|"
    for kind in sorted(_kinds(), key=lambda kind: (kind.status, kind.code)):
        happened = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        yield f"| {kind.status} | `{kind.code}` | {' '.join(happened.split())} |"


def _kinds(of: type[errors.AdmissionError] = errors.AdmissionError) -> Iterator[type[errors.AdmissionError]]:
    for kind in of.__subclasses__():
        yield from _kinds(kind)
        if "code" in vars(kind):
            yield kind


def route_rows() -> Iterator[str]:
    """Every route of the admin port, with the errors of its own."""
    yield "| route | answer | errors |"
    yield "|---|---|---|"
    for operation in OPERATIONS:
        mark = ("*" if operation.is_of_a_pool else "") + (" (open)" if operation.is_open else "")
        refusals = ", ".join(_refusals(operation))
        yield f"| `{operation.method} {operation.path}`{mark} | {operation.summary} | {refusals} |"


def _refusals(operation: Operation) -> Iterator[str]:
    for status, answer in operation.answers.items():
        codes = () if isinstance(answer, PageAnswer) else (refusal.partition(":")[0] for refusal in answer)
        named = dict.fromkeys(code for code in codes if code != "unknown_page")
        if named:
            yield f"{status} " + " or ".join(f"`{code}`" for code in named)


TABLES: Mapping[str, Callable[[], Iterable[str]]] = {"errors": error_rows, "routes": route_rows}
PAGES = (DOCS / "http.md",)


def current(page: Path) -> str:
    """The page with its tables as the declarations have them."""
    text = page.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: found[1] + "\n".join([*TABLES[found[2]](), found[3]]), text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(current(page), encoding="utf-8")
