from __future__ import annotations

import argparse

import pytest

from sidecar.cli.arguments import server_url


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("http://engine:8000", "http://engine:8000"),
        ("http://engine:8000/", "http://engine:8000"),
        ("engine:8000", "http://engine:8000"),
        ("https://engine/engine-a/", "https://engine/engine-a"),
        ("http://v1", "http://v1"),
        ("http://engine/av1", "http://engine/av1"),
    ],
)
def test_an_address_is_used_as_it_is_written(written: str, used: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert server_url(written) == used
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("http://engine:8000/v1", "http://engine:8000"),
        ("http://engine:8000/v1/", "http://engine:8000"),
        ("engine:8000/v1", "http://engine:8000"),
        ("https://engine/engine-a/v1", "https://engine/engine-a"),
    ],
)
def test_the_v1_at_the_end_is_left_out_with_one_line(
    written: str, used: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server_url(written) == used
    said = "sidecar: the /v1 at the end of the server's address is left out, because every path begins with it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("written", ["ftp://engine/v1", "http://", "", "http://engine/?a=/v1", "http://engine:port/v1"])
def test_what_is_no_address_is_an_error(written: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write one like http"):
        server_url(written)
