"""A web server with the pages that a test gives it, in a thread, and what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Pages = Mapping[str, tuple[int, str]]
"""Status and text by path; any other path is a 404."""


class PageServer(ThreadingHTTPServer):
    """Its pages may be changed while it runs. `asked` has the path and the headers of each request."""

    daemon_threads = True

    def __init__(self, by_path: Pages) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.by_path = dict(by_path)
        self.asked: list[tuple[str, Message]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers))
        status, text = self.server.by_path.get(self.path, (404, "{}"))
        body = text.encode()
        self.send_response(status)
        if text.startswith("<!doctype html>"):
            self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def serving_pages(by_path: Pages) -> Iterator[PageServer]:
    """The server, until the block ends."""
    with PageServer(by_path) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
