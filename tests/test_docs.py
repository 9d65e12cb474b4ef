"""The pages for people: every link inside the repository leads somewhere, and every page of docs/ is in its index."""

from __future__ import annotations

import runpy
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.markdown import anchors, links

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = ("http://", "https://", "mailto:")


def is_hidden(path: Path) -> bool:
    """Whether it lies in an environment or a cache."""
    return any(part.startswith(".") for part in path.relative_to(ROOT).parts)


PAGES = [path for path in sorted(ROOT.rglob("*.md")) if not is_hidden(path)]
SHOWN = [str(path.relative_to(ROOT)) for path in PAGES]


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    return [link for link in links(page) if not link.startswith(ELSEWHERE) and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / unquote(path) if path else page
    if not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and unquote(anchor) in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=SHOWN)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=SHOWN)
def test_no_link_leaves_the_repository_but_by_its_address(page: Path) -> None:
    inside = [link.partition("#")[0] for link in links(page) if not link.startswith(ELSEWHERE)]
    assert [link for link in inside if not (page.parent / unquote(link)).resolve().is_relative_to(ROOT.resolve())] == []


def test_the_index_names_every_page_of_the_docs_and_the_readme_names_the_index() -> None:
    named = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md") if "://" not in link}
    written = {path.resolve() for path in DOCS.glob("*.md")} - {(DOCS / "README.md").resolve()}
    assert written - named == set()
    assert "docs/README.md" in links(ROOT / "README.md")


def test_the_picture_of_a_pool_is_that_of_the_shipped_policy() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "pool.py"))["text"]()
    assert (DOCS / "pictures" / "pool.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[gone](gone.md)", ["gone.md"]),
        ("[part](there.md#no-such-part)", ["there.md#no-such-part"]),
        ("[own](#no-such-part)", ["#no-such-part"]),
        ("![picture](gone.png)", ["gone.png"]),
        ("[![picture](gone.png)](there.md)", ["gone.png"]),
        ('<img src="gone.png">', ["gone.png"]),
        ("[a `code` span](gone.md)", ["gone.md"]),
        ("[fine](there.md#a-part-of-it-twice-1), [away](https://example.com/gone), [own](#here)\n# Here", []),
        ("`[code](gone.md)`\n```\n[code](gone.md)\n```", []),
        ("[not a heading](there.md#a-comment)", ["there.md#a-comment"]),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, text: str, expected: list[str]) -> None:
    """A negative control: the tests above can fail."""
    there = "# A part: `of` it, twice\n```sh\n# a comment\n```\n# A part [of](x.md) it, twice\n"
    (tmp_path / "there.md").write_text(there, encoding="utf-8")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert broken(tmp_path / "page.md") == expected
