"""The admin port's token in a real browser: the page comes alive, and the token is in no place that is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.test_admin_access import TOKEN, sidecar
from tests.support.browser import browser
from tests.support.devtools import headless, tab

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(browser() is None, reason="no browser: `sh .ci/browser` installs one"),
]


@pytest.mark.long
async def test_a_browser_needs_the_token_once(tmp_path: Path) -> None:
    with sidecar(SIDECAR_ADMIN_TOKEN=TOKEN) as url, headless(tmp_path) as tools:
        async with tab(tools) as page:
            await page.open(url)
            assert "this needs the admin token" in await page.text()
            await page.open(f"{url}/?token={TOKEN}")
            await page.until("document.getElementById('link').className === 'live'")
            assert await page.evaluate("location.href") == f"{url}/"
            assert await page.evaluate("document.cookie") == "", "no script reads it"
            await page.open(url)
            await page.until("document.getElementById('link').className === 'live'")
            assert TOKEN not in str(await page.evaluate("document.documentElement.outerHTML"))
