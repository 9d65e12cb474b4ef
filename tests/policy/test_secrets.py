"""Secrets from variables and from files, and what is said where they cannot be had: never the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.policy.secrets import key_in_file, secret, secret_for_header
from tests.support.each import each


def test_a_variable_or_a_file_without_the_end_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"from a file\r\n")
    assert secret({"KEY": "written"}, "KEY") == "written"
    assert secret({"KEY_FILE": str(file)}, "KEY") == "from a file"
    assert secret({"KEY": "", "KEY_FILE": ""}, "KEY") is None
    assert secret({}, "KEY") is None


@each(
    ("content", "said"),
    [
        (None, "'{file}' cannot be read (No such file or directory); name a file that this user may read"),
        (b"\n", "'{file}' is empty; write the secret into it"),
        (b"hidden\xff", "'{file}' is not text; name the secret's own file"),
        (b"hidden" * 20_000, "'{file}' is larger than 65536 bytes; name the secret's own file"),
    ],
)
def test_a_file_that_holds_no_secret_is_said_so(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^KEY_FILE: ") as refused:
        secret({"KEY_FILE": str(file)}, "KEY")
    assert str(refused.value) == f"KEY_FILE: {said.format(file=file)}"


def test_both_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="KEY and KEY_FILE are both set; unset one of them") as refused:
        secret({"KEY": "hidden", "KEY_FILE": str(tmp_path)}, "KEY")
    assert "hidden" not in str(refused.value)


@each("written", ["hidden key", "hidden\r\nx-priority: high", "hiddén", "hidden\n"])
def test_what_cannot_travel_in_a_header_is_refused_without_being_shown(written: str) -> None:
    with pytest.raises(ValueError, match="KEY: contains a space, a line end or a character beyond ASCII") as refused:
        secret_for_header({"KEY": written}, "KEY")
    assert "hidd" not in str(refused.value)


def test_the_file_of_an_option_is_read_as_that_of_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"sk-hidden\n")
    assert key_in_file(str(file), "--key-file") == "sk-hidden"
    file.write_bytes(b"key   sk-hidden\n")
    with pytest.raises(ValueError, match=r"^--key-file: contains a space") as refused:
        key_in_file(str(file), "--key-file")
    assert "hidden" not in str(refused.value)
