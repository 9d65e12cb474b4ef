"""From sglang/srt/environ.py: a variable is read whenever it is asked for."""

import os


class EnvStr:
    def __init__(self, name: str, default: str) -> None:
        self.name, self.default = name, default

    def get(self) -> str:
        return os.environ.get(self.name, self.default)


class envs:  # noqa: N801
    SGLANG_HTTP_SERVER_APP_PATH = EnvStr("SGLANG_HTTP_SERVER_APP_PATH", "sglang.srt.entrypoints.http_server:app")
