from __future__ import annotations

import argparse

import pytest

from sidecar.cli.arguments import engine_address, number, server_url, socket_address, whole_number


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


WRONG_SOCKETS = ["unix:", "unix:run/vllm.sock", "unix:///run/vllm.sock", "UNIX:/run/vllm.sock", "unix:/" + "a" * 200]


@pytest.mark.parametrize("written", WRONG_SOCKETS)
def test_what_is_no_unix_socket_is_an_error_and_never_a_host_of_that_name(written: str) -> None:
    for read in (engine_address, socket_address):
        with pytest.raises(argparse.ArgumentTypeError, match="Unix socket"):
            read(written)


def test_a_unix_socket_is_an_engines_address_for_serve_alone() -> None:
    assert engine_address("unix:/run/vllm.sock") == socket_address("unix:/run/vllm.sock") == "unix:/run/vllm.sock"
    assert engine_address("engine:8000/") == "http://engine:8000"
    with pytest.raises(argparse.ArgumentTypeError, match=r"`sidecar serve` alone .* write one like http"):
        server_url("unix:/run/vllm.sock")
    with pytest.raises(argparse.ArgumentTypeError, match="--host and --port"):
        socket_address("127.0.0.1:8080")


@pytest.mark.parametrize("written", ["0", "-1", "1.5", "33", "many", "", "\u0661", "1" * 5000])
def test_what_is_no_whole_number_in_its_bounds_is_an_error(written: str) -> None:
    assert whole_number("number of replicas", 1, 32)("32") == 32
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of replicas; write a number from 1 to 32"):
        whole_number("number of replicas", 1, 32)(written)


@pytest.mark.parametrize("written", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_what_is_no_number_in_its_bounds_is_an_error(written: str) -> None:
    assert number("time", 600)("0.5") == 0.5
    assert number("time", may_be_zero=True)("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="is no time; write a number that is more than 0, up to 600"):
        number("time", 600)(written)
