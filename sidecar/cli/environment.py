"""Options of a command from the environment: `sidecar serve --admin-port` is SIDECAR_SERVE_ADMIN_PORT, too.

An option on the command line goes before its variable. A variable that is empty counts as not set.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

_ON, _OFF = frozenset(("1", "true", "yes", "on")), frozenset(("0", "false", "no", "off"))
_OF_KUBERNETES = (
    "; Kubernetes sets such variables for a Service called {service}: set enableServiceLinks: false in the pod, or "
    "call the Service something else"
)


def variable_for(command: str, option: str) -> str:
    """The variable of an option: `--admin-port` of `serve` is SIDECAR_SERVE_ADMIN_PORT."""
    return "_".join(("sidecar", command, option.lstrip("-"))).replace("-", "_").upper()


def options_by_name(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """The actions that have an option with a long name, by that."""
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:
        long = next((option for option in action.option_strings if option.startswith("--")), None)
        if long is not None and not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            found[long] = action
    return found


def from_environment(
    parser: argparse.ArgumentParser, command: str, given: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """The options that the environment has and the command line does not, as they would be written there.

    Ends the command, as argparse does, for a value that is none; the message names the variable.
    """
    if {"-h", "--help"}.intersection(given):
        return []
    on_command_line = {option for option in map(_option, given) if option is not None}
    found: list[str] = []
    for option, action in options_by_name(parser).items():
        variable = variable_for(command, option)
        value = environment.get(variable, "")
        if value and not any(on_command_line.intersection(rival.option_strings) for rival in _rivals(parser, action)):
            found += _list_values(parser, action, option, variable, value)
    return found


def _option(word: str) -> str | None:
    return word.partition("=")[0] if word.startswith("--") else None


def _rivals(parser: argparse.ArgumentParser, action: argparse.Action) -> list[argparse.Action]:
    """The action, and those that exclude it."""
    groups = (group._group_actions for group in parser._mutually_exclusive_groups)
    return [action, *(rival for group in groups if action in group for rival in group)]


def _list_values(
    parser: argparse.ArgumentParser, action: argparse.Action, option: str, variable: str, value: str
) -> list[str]:
    if action.nargs == 0:
        if value.lower() not in _ON | _OFF:
            parser.error(f"{variable}: {value!r} is neither 1 nor 0")
        return [option] if value.lower() in _ON else []
    takes_several = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+")
    values = shlex.split(value) if takes_several else [value]
    for one in values:
        _check(parser, action, variable, one)
    if action.nargs in ("*", "+"):
        return [option, *values]
    return [f"{option}={one}" for one in values]


def _check(parser: argparse.ArgumentParser, action: argparse.Action, variable: str, value: str) -> None:
    read: object = value
    if callable(action.type):
        try:
            read = action.type(value)
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            service = variable.removesuffix("_PORT").replace("_", "-").lower()
            hint = _OF_KUBERNETES.format(service=service) if value.startswith("tcp://") else ""
            parser.error(f"{variable}: {error}{hint}")
    if action.choices is not None and read not in action.choices:
        parser.error(f"{variable}: {value!r} is none of {', '.join(map(str, action.choices))}")
