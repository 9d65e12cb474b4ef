from __future__ import annotations

import hashlib
import io
import re

import pytest

from sidecar.cli import main
from tests.support.in_process import output


def _hash(monkeypatch: pytest.MonkeyPatch, typed: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["keys", "hash"])


def test_new_prints_a_key_and_the_hash_of_that_key() -> None:
    printed = output("keys", "new")
    (key,) = re.findall(r"^key   (sk-\S+)$", printed, re.MULTILINE)
    assert f'hash  "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n' in printed


def test_hash_reads_the_key_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _hash(monkeypatch, "sk-mine-and-long-enough\n") == 0
    assert capsys.readouterr().out == f'"sha256:{hashlib.sha256(b"sk-mine-and-long-enough").hexdigest()}"\n'


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "no key was given"),
        ("sha256:" + "0" * 64, "that is a hash already"),
        (" \n", "no key was given"),
        ("two words of sixteen bytes", "that has a space in it"),
        ("key   sk-mine-and-long-enough\n", "that has a space in it"),
        ("sk-mine-and-long-enough \n", "that has a space in it"),
        ("sk-mine\tand-long-enough", "that has a space in it"),
        ("sk-mine-and-long-enough\nsk-another-one-as-well\n", "that has more than one line"),
        ("schlüssel-mit-umlauten", "that has a character that no client can send"),
        ("sk-mine-and-\x07-long-enough", "that has a character that no client can send"),
        ("fifteen-bytes-!", "that has 15 bytes, and a key needs 16"),
        ("x" * 5000, "that is longer than 4096 bytes"),
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    assert _hash(monkeypatch, typed) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"sidecar keys: {said}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not typed.strip() or typed.strip() not in printed.err


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_sixteen_bytes_are_a_key_whatever_ends_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    assert _hash(monkeypatch, f"sixteen-bytes-ok{end}") == 0
    assert capsys.readouterr().out == f'"sha256:{hashlib.sha256(b"sixteen-bytes-ok").hexdigest()}"\n'


def test_a_key_is_never_taken_from_the_command_line() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["keys", "hash", "sk-mine-and-long-enough"])
    assert stopped.value.code == 2
