"""Pages and texts as Jinja2 templates. In a page all values are escaped, and what does not print is shown as its code.

Jinja2 is imported with the first page: a server that shows none does not have it in memory.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sidecar.telemetry.logs.formats import one_line

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import EvalContext


def render(name: str, **values: object) -> str:
    """The page that the template `name` makes of the values. A name that it lacks is an error, not empty."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, pass_eval_context, select_autoescape

    return Environment(
        loader=PackageLoader(__package__ or "", ""),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        finalize=pass_eval_context(_printable),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(context: EvalContext, value: object) -> object:
    """Text that came from elsewhere, on one line; markup, which is a template's own, as it is."""
    return one_line(value) if context.autoescape and type(value) is str else value
