"""A real browser without a screen: what it makes of a page, and what it complains about."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WITHIN_S = 60.0


@dataclass(frozen=True)
class Page:
    """The document after the browser has read it, and what its console said."""

    dom: str
    console: list[str]


@functools.cache
def browser() -> str | None:
    """The first browser that runs here; some distributions have one on the path that only says how to get it."""
    for name in NAMES:
        if (path := shutil.which(name)) is None:
            continue
        try:
            subprocess.run([path, "--version"], capture_output=True, timeout=WITHIN_S, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return path
    return None


def opened(url: str, folder: Path, *options: str) -> Page:
    """Opens a page. Its profile is `folder`, so that nothing of the user's is touched."""
    path = browser()
    command = [
        path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--disable-background-networking", "--no-first-run", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", url,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True)
    return Page(ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line])
