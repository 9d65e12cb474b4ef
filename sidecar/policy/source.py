"""One YAML file as plain data, with the line of every value.

YAML is read event by event and not with `safe_load`. `safe_load` drops the lines, accepts a key that is written twice,
and turns `no` into false, `010` into 8 and `12:30` into 750. Aliases and tags are refused: a policy needs neither, and
both let a small file become a large one. Any bytes give a `Document`.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path as FilePath

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)
from yaml.nodes import ScalarNode
from yaml.reader import Reader
from yaml.resolver import Resolver

from sidecar.policy.problems import FilePlace, Path, Problem, dotted, printable, quoted
from sidecar.policy.units import Ambiguous

LARGEST_FILE_BYTES = 2**20
"""A tenant with ten thousand keys fits; a log file given by mistake does not."""

DEEPEST = 12
"""A policy is five levels deep. A far deeper file is no policy, and must not exhaust the stack."""

_TOO_DEEP = "nested too deeply; a policy is at most five levels deep"

LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser is ten times faster
_RESOLVER = Resolver()
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FRACTION = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,17}")
_TAG = "tag:yaml.org,2002:"
_MEANINGS = {"int": "another number", "float": "another number", "timestamp": "a date", "merge": "a merge"}


@dataclass(frozen=True, slots=True)
class Document:
    """A file's mapping, the line of every path in it, and what was wrong with it as YAML.

    `data` is None where the file holds no mapping that could be checked any further; `problems` then says why.
    `is_missing`: there is no file, and no link in its place.
    """

    file: str
    content: bytes = field(repr=False)  # neither is shown: a store's address may hold a password
    data: dict[str, object] | None = field(repr=False)
    lines: dict[Path, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    is_missing: bool = False

    def place(self, path: Path) -> FilePlace:
        """The line of the value at `path`, or of the nearest thing around it that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        return FilePlace(self.file, self.lines.get(path, 1))

    def problem(self, path: Path, message: str) -> Problem:
        """A mistake at `path`."""
        return Problem(dotted(path), message, self.place(path))


class _Unreadable(Exception):
    """Reading this file stops here."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.problem_at = (message, line)


def read(path: FilePath) -> Document:
    """Reads a file. Never raises: a file that is missing, is not text or is not YAML has `problems` and no `data`."""
    file, content = str(path), b""
    try:
        content = _content(path)
        builder = _Builder(file, _text(content))
        return Document(file, content, builder.mapping(), builder.lines, tuple(builder.problems))
    except _Unreadable as stop:
        message, line = stop.problem_at
        is_missing = isinstance(stop.__cause__, FileNotFoundError) and not path.is_symlink()
        return Document(
            file, content, None, problems=(Problem("", message, FilePlace(file, line)),), is_missing=is_missing
        )


def _content(path: FilePath) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise _Unreadable(unreadable(str(path), error, "file")) from error
    except ValueError:
        raise _Unreadable("its name is not valid; give a file that this user may read") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise _Unreadable("larger than 1 MiB; a policy is a small file of YAML")
    return content


def unreadable(path: str, error: OSError, kind: str) -> str:
    """Why a file or a folder cannot be read, and what would mend it. `kind` is "file" or "folder"."""
    if error.errno == errno.ENOENT and os.path.islink(path):
        target = printable(os.readlink(path), 300)
        return f"a link to {target}, which does not exist; mend the link, or remove it"
    if error.errno == errno.ELOOP:
        return "a link that leads back to itself; mend the link, or remove it"
    if error.errno == errno.ENOENT:
        return f"there is no such {kind}; make it, or name another"
    if error.errno == errno.EISDIR:
        return "a folder, and not a file; name a file"
    if error.errno == errno.ENOTDIR and kind == "folder":
        return "a file, and not a folder; name a folder"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot be read by user {os.geteuid()} ({error.strerror}); let this user read it"
    return f"cannot be read ({error.strerror}); name a {kind} that can be"


def _text(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in content[: error.start + 1024] and content[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise _Unreadable("not text; a policy is a small file of YAML") from None
        line = content.count(b"\n", 0, error.start) + 1
        raise _Unreadable("not UTF-8 text; save the file as UTF-8", line) from None
    if control := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, control.start()) + 1
        raise _Unreadable("a character that cannot be printed; remove it, or save the file as plain text", line)
    return text


class _Builder:
    """Builds one document's data out of YAML's events, noting lines and everything that is wrong on the way."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.lines: dict[Path, int] = {(): 1}
        self.problems: list[Problem] = []
        self.events = _events(text)

    def mapping(self) -> dict[str, object]:
        """The file's top level, which must be a mapping, and all there is in the file."""
        next(self.events)  # the stream's start
        if isinstance(next(self.events), StreamEndEvent):
            raise _Unreadable("the file is empty; `sidecar init` writes files to begin with")
        first = next(self.events)
        data = self._node(first, ())
        next(self.events)  # the document's end
        following = next(self.events)
        if isinstance(following, DocumentStartEvent):
            raise _Unreadable("a second document begins here; write one document per file", _line(following))
        if not isinstance(data, dict):
            raise _Unreadable('not a mapping; write "key: value" lines', _line(first))
        return data

    def _node(self, event: Event, path: Path) -> object:
        line = _line(event)
        if len(path) > DEEPEST:
            raise _Unreadable(_TOO_DEEP, line)
        if isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor):
            raise _Unreadable("YAML anchors and aliases are not supported; write the value out", line)
        if getattr(event, "tag", None):
            raise _Unreadable("YAML tags (!...) are not supported; write the plain value", line)
        if isinstance(event, ScalarEvent):
            return event.value if event.style else _plain(event.value)
        return self._entries(path) if isinstance(event, MappingStartEvent) else self._items(path)

    def _entries(self, path: Path) -> dict[str, object]:
        entries: dict[str, object] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            name = self._name(event, path)
            here = (*path, name)
            if name in entries:
                self._report(here, _line(event), f"written twice, first on line {self.lines[here]}; keep one of them")
            self.lines[here] = _line(event)
            entries[name] = self._node(next(self.events), here)
        return entries

    def _name(self, event: Event, path: Path) -> str:
        if not isinstance(event, ScalarEvent):
            raise _Unreadable("a key that is not a name; write a plain name before the colon", _line(event))
        self._node(event, path)  # refuses an anchor or a tag
        found = None if event.style else _plain(event.value)
        if isinstance(found, (Ambiguous, bool)) or (found is None and not event.style):
            meaning = getattr(found, "meaning", None) or ("nothing" if found is None else str(found).lower())
            message = f"a name that means {meaning} in YAML; put it in quotes: {quoted(event.value)}"
            self._report((*path, event.value), _line(event), message)
        return str(event.value)

    def _items(self, path: Path) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            here = (*path, len(items))
            self.lines[here] = _line(event)
            items.append(self._node(event, here))
        return items

    def _report(self, path: Path, line: int, message: str) -> None:
        self.problems.append(Problem(dotted(path), message, FilePlace(self.file, line)))


def _events(text: str) -> Iterator[Event]:
    """YAML's events; whatever its parser objects to ends the file with a sentence."""
    try:
        yield from yaml.parse(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = printable(str(error.problem or error.context or "cannot be understood"), 100)
        if "nesting depth" in problem:  # libyaml 0.2.6 and later ends at 1,000 levels, before it gives their events
            raise _Unreadable(_TOO_DEEP, line) from None
        hint = "check the indentation, the quotes and the brackets"
        if "mapping values" in problem:
            hint = 'put quotes around a value that contains ": "'
        raise _Unreadable(f"not YAML: {problem}; {hint}", line) from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise _Unreadable("not YAML; check the indentation, the quotes and the brackets") from None


def _line(event: Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark else 1


@lru_cache(maxsize=1024)  # the same few words stand in every tenant's file
def _plain(text: str) -> object:
    """An unquoted scalar: true, false, null, a decimal number or text, and `Ambiguous` where readers may disagree."""
    kind = str(_RESOLVER.resolve(ScalarNode, text, (True, False))).removeprefix(_TAG)  # type: ignore[no-untyped-call]  # stub
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if kind == "int" and _DECIMAL.fullmatch(text):
        return int(text)
    if kind == "float" and _FRACTION.fullmatch(text):
        return float(text)
    return Ambiguous(text, _meaning(kind, text))


def _meaning(kind: str, text: str) -> str:
    """YAML's reading of an ambiguous scalar, where it is worth a hint."""
    if kind == "bool":
        return "true" if text.lower() in {"yes", "on"} else "false"
    if kind == "int" and len(text) <= 20:
        return str(yaml.safe_load(text))
    return _MEANINGS.get(kind, "something else")
