"""Makes the picture of the demo in docs/pictures anew: `python -m tests.tools.demo.pictures [FOLDER]`.

It plays `sidecar demo`, opens its live page in a browser, and takes the pictures when the run with admission is at its
fullest. A phone's goes to FOLDER, by default to a temporary one: it is for looking at, not for the docs.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.devtools import headless, tab
from tests.support.png import smaller

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
FULL_AFTER_S = 5.0


async def pictures(page_url: str, tools: str, folder: Path) -> None:
    """Takes them while the page is live."""
    async with tab(tools) as page:
        await page.look(1180, 900)
        await page.open(page_url)
        await page.until("document.title.includes('wait') || document.title.includes('starve')", within_s=120)
        await asyncio.sleep(FULL_AFTER_S)
        for path, width, height in ((folder / "demo-phone.png", 390, 1250), (PICTURES / "demo.png", 1180, 0)):
            await page.look(width, height or 900)
            await asyncio.sleep(1.2)
            path.write_bytes(smaller(await page.picture(whole=not height)))


def main(folder: Path) -> None:
    """Plays the demo, and takes its pictures."""
    command = [sys.executable, "-m", "sidecar.cli", "demo"]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        headless(Path(profile)) as tools,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo,
    ):
        address = re.search(r"http://127\.0\.0\.1:\d+/", demo.stdout.readline())
        assert address
        asyncio.run(pictures(address[0], tools, folder))
        demo.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
