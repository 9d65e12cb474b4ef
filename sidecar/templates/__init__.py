"""Pages as Jinja2 templates. All values are escaped, and characters that do not print are shown as their codes.

Jinja2 is imported with the first page: a server that shows none does not have it in memory.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sidecar.telemetry.logs.formats import one_line

if TYPE_CHECKING:
    from jinja2 import Environment


def render(name: str, **values: object) -> str:
    """The page that the template `name` makes of the values. A name that it lacks is an error, not empty."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(__package__ or "", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: object) -> object:
    """Text that came from elsewhere, on one line; markup, which is a template's own, as it is."""
    return one_line(value) if type(value) is str else value
