"""Pages that cost the engine something and never change while it runs: they are read once, not every second."""

from __future__ import annotations

from collections.abc import Collection

from sidecar.engines.reading.pages import Page, Pages, Unread

_ENGINE_IS_AWAY = 500
"""From this status on an answer is that of a proxy before an engine that is away, or of an engine that is ending."""


class AskedOnce:
    """Around other pages: keeps the answers to `paths` until the engine is away, for it may come back as another.

    A page that is not there is an answer, too.
    """

    def __init__(self, pages: Pages, paths: Collection[str]) -> None:
        self._pages = pages
        self._paths = frozenset(paths)
        self._answers: dict[str, Page] = {}

    @property
    def host(self) -> object | None:
        """See `Pages.host`."""
        return self._pages.host

    async def get(self, path: str) -> Page:
        """See `Pages.get`."""
        answer = self._answers.get(path)
        return await self._ask(path) if answer is None else answer

    async def _ask(self, path: str) -> Page:
        try:
            page = await self._pages.get(path)
        except Unread:
            self._answers.clear()
            raise
        if page.status >= _ENGINE_IS_AWAY:
            self._answers.clear()
        elif path in self._paths:
            self._answers[path] = page
        return page
