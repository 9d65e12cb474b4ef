"""Unix sockets that the sidecar listens on: their files, what is there before, and what stays after."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from sidecar.server import CannotServe
from sidecar.server.listeners import listening, socket_address
from sidecar.server.server import leads_to


def test_a_sockets_file_is_for_all_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    with listening(f"unix:{path}", 0) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert socket_address(listener) == f"unix:{path}"
        assert leads_to(f"unix:{tmp_path}/./sidecar.sock", [listener])
        assert not leads_to(f"unix:{tmp_path}/other.sock", [listener])
        assert not leads_to("http://127.0.0.1:8000", [listener])
    assert not path.exists()


def test_the_file_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with listening(f"unix:{path}", 0), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_what_another_process_has_is_left_alone(tmp_path: Path) -> None:
    path, file = tmp_path / "sidecar.sock", tmp_path / "file"
    file.write_text("kept")
    with listening(f"unix:{path}", 0):
        for _ in range(4):  # its queue is full at last, and it does not answer
            with pytest.raises(CannotServe, match="another process listens there"), listening(f"unix:{path}", 0):
                pass
        assert path.exists()
    for taken, words in ((file, "there is a file that is no socket"), (tmp_path / "no" / "x", "No such file")):
        with pytest.raises(CannotServe, match=words), listening(f"unix:{taken}", 0):
            pass
    assert file.read_text() == "kept"


def test_a_file_that_another_process_has_made_since_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.sock"
    with listening(f"unix:{path}", 0), socket.socket(socket.AF_UNIX) as other:
        os.rename(path, tmp_path / "before")
        other.bind(str(path))
    assert path.exists()
