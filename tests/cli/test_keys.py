from __future__ import annotations

import hashlib
import io
import re

import pytest

from sidecar.cli import main


def _hash(monkeypatch: pytest.MonkeyPatch, typed: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["keys", "hash"])


def test_new_prints_a_key_and_the_hash_of_that_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new"]) == 0
    printed = capsys.readouterr().out
    (key,) = re.findall(r"^key   (sk-\S+)$", printed, re.MULTILINE)
    assert f'hash  "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n' in printed


def test_hash_reads_the_key_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _hash(monkeypatch, "sk-mine\n") == 0
    assert capsys.readouterr().out == f'"sha256:{hashlib.sha256(b"sk-mine").hexdigest()}"\n'


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "no key was given"),
        ("sha256:" + "0" * 64, "that is a hash already"),
        ("two words", "that cannot be sent as an API key"),
        ("schlüssel", "that cannot be sent as an API key"),
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    assert _hash(monkeypatch, typed) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert printed.out == ""
    assert not typed or typed not in printed.err


def test_a_key_is_never_taken_from_the_command_line() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["keys", "hash", "sk-mine"])
    assert stopped.value.code == 2
