"""Keys of a tenant's file: one more or one less, with everything else in the file as it was.

The text is edited where YAML's parser finds the list. The new text is read before it is used, and must say exactly what
was meant. It replaces the file as a whole, with its mode and owner, unless that has changed meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from sidecar.cli.output import CommandFailed
from sidecar.policy.compiler import Loaded
from sidecar.policy.source import LARGEST_FILE_BYTES, LOADER, read
from sidecar.policy.stored_tenants import InvalidTenant, read_tenant
from sidecar.policy.tenant_keys import UnknownKey, find_key


def change_keys(loaded: Loaded, tenant: str, change: Mapping[str, str] | str) -> tuple[Path, int]:
    """Adds an entry to the keys of a tenant's file, or removes the one that `find_key` finds. Raises CommandFailed.

    Returns the file, and how many keys it has then.
    """
    path = Path(os.path.realpath(loaded.tenants[tenant].file))
    try:
        with _alone_in(path.parent):
            before = read(path)
            data: dict[str, Any] = dict(before.data or {})
            keys, entries = read_tenant(data, loaded.policy).keys or (), [*data.get("keys", ())]
            text = before.content.decode()
            if isinstance(change, str):
                place = keys.index(find_key(keys, change))
                text = _without_entry(text, place)
                del entries[place]
            else:
                text = _with_entry(text, _entry(change))
                entries.append(dict(change) if len(change) > 1 else change["hash"])
            data["keys"] = entries
            read_tenant(data, loaded.policy)
            if len(text.encode()) > LARGEST_FILE_BYTES:
                raise CommandFailed(f"{path}: would be larger than 1 MiB, which cannot be read; revoke old keys first")
            with _written_beside(path, text.encode()) as new:
                if read(new).data != data:
                    raise CommandFailed(f"{path}: its `keys` are written in a way that only an editor can change")
                if read(path).content != before.content:
                    raise CommandFailed(f"{path} has changed meanwhile, and was left as it is; run the command again")
                new.replace(path)
    except (UnknownKey, InvalidTenant) as refused:
        raise CommandFailed(f"tenant {tenant}: {refused}") from None
    except OSError as error:
        raise CommandFailed(f"{path}: cannot be written ({error.strerror}); it is as it was") from None
    return path, len(entries)


def _entry(change: Mapping[str, str]) -> str:
    """An entry as it is written: its hash alone, where there is no more about it."""
    members = ", ".join(f"{name}: {json.dumps(value)}" for name, value in change.items())
    return "{" + members + "}" if len(change) > 1 else json.dumps(change["hash"])


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other such command changes a file of the folder meanwhile."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextmanager
def _written_beside(file: Path, content: bytes) -> Iterator[Path]:
    """A new file with the mode and the owner of another, which no pattern of tenants' files finds. Gone at the end."""
    new, status = file.with_name(f".{file.name}.new"), file.stat()
    try:
        with new.open("wb") as stream:
            os.fchown(stream.fileno(), status.st_uid, status.st_gid)
            os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        yield new
    finally:
        new.unlink(missing_ok=True)


def _with_entry(text: str, entry: str) -> str:
    """The text with one more entry at the end of `keys`."""
    end = "\r\n" if "\r\n" in text else "\n"
    if text and not text.endswith("\n"):
        text += end
    keys = _keys(text)
    if keys is None:
        return f"{text}keys:{end}  - {entry}{end}"
    if keys.flow_style:
        at = _end(keys.value[-1]) if keys.value else keys.end_mark.index - 1
        return f"{text[:at]}{', ' if keys.value else ''}{entry}{text[at:]}"
    at = text.find("\n", _end(keys)) + 1 or len(text)
    return f"{text[:at]}{' ' * keys.start_mark.column}- {entry}{end}{text[at:]}"


def _without_entry(text: str, place: int) -> str:
    """The text without one entry of `keys`."""
    keys = _keys(text)
    assert keys is not None
    item = keys.value[place]
    start, stop = item.start_mark.index, _end(item)
    if len(keys.value) == 1:
        begin = keys.start_mark.index
        return text[:begin] + ("" if keys.start_mark.column else "  ") + "[]" + text[_end(keys) :]
    if not keys.flow_style:
        return text[: text.rindex("\n", 0, start) + 1] + text[text.find("\n", stop) + 1 or len(text) :]
    if place + 1 < len(keys.value):
        stop = keys.value[place + 1].start_mark.index
    elif text[_end(keys.value[place - 1]) : start].strip() == ",":
        start = _end(keys.value[place - 1])
    return text[:start] + text[stop:]


def _keys(text: str) -> SequenceNode | None:
    """The list `keys` in a file's text, with its places there; None where there is none."""
    root = yaml.compose(text, Loader=LOADER)
    pairs = root.value if isinstance(root, MappingNode) else []
    return next((value for name, value in pairs if name.value == "keys" and isinstance(value, SequenceNode)), None)


def _end(node: Node) -> int:
    """The place where a node's own text ends. That of a list or mapping in lines of its own goes on to what follows."""
    while node.value and isinstance(node, SequenceNode | MappingNode) and not node.flow_style:
        node = node.value[-1] if isinstance(node, SequenceNode) else node.value[-1][1]
    return int(node.end_mark.index)
