"""The pages for people: links lead somewhere, the index is complete, words are field terms, and the README is short."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from tests.support.markdown import anchors, links, prose

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = ("http://", "https://", "mailto:")
README_WORDS = 900
RELEASE_WORDS = 600
"""The most that a reader takes in before a first try: about four minutes. Counted as `wc -w` counts, code included."""
DOCS_PAGES, DOCS_WORDS = 14, 25_000
"""The most that one person keeps true."""
PRIVATE = {
    "admission controller, the middleware, the proxy": r"doors?|house|lookout",
    "request, ticket, lease": r"(?:an|the|whole) exchange|exchanges|(?:a|its|the|whole) stay|strangers?",
    "policy snapshot": r"rulings?",
    "release, abort": r"let(?:s|ting)? go",
    "after, before": r"behind",
    "uses, applies, follows": r"go(?:es)? by",
    "reported, said in the response": r"told",
    "disconnect": r"hangs? up|hung up|departures?",
    "dry run, shadow request": r"witness(?:es)?|overheard",
    "no one, the caller, the client, the operator": r"nobody|whoever|anybody|everybody|somebody",
}
HONEST = ("behind Envoy", "behind one address", "Who goes ahead of whom", "What to expect:")
"""Two places in a network, a panel of the dashboard, the label of a list."""
SUBJECT = re.compile(r"(?:^[-* ]*|[.:;!] )(?:Who|Whoever|What)\b[^.?|]*(?:[.|]|$)", re.MULTILINE)
"""A sentence whose subject is Who or What; a question, a heading, a cell and a label in bold may begin with it."""


def pages(folder: Path) -> list[Path]:
    """Those in it and below it, but none of an environment or a cache, which have thousands of folders."""
    below = (one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    return sorted([*folder.glob("*.md"), *(page for one in below for page in pages(one))])


PAGES = pages(ROOT)
WORDED = [
    ROOT / "README.md",
    *sorted(DOCS.rglob("*.md")),
    ROOT / "otel" / "README.md",
    ROOT / "benchmarks" / "README.md",
]
WORDED += sorted((ROOT / "examples").rglob("*.md"))


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    return [link for link in links(page) if not link.startswith(ELSEWHERE) and not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / unquote(path) if path else page
    if not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and unquote(anchor) in anchors(target))


def plain(text: str) -> str:
    """Sentences alone: without code, targets of links, comments, and the phrases that are allowed."""
    text = re.sub(r"`+[^`]*`+|\]\([^)]*\)|<!--.*?-->", "", prose(text), flags=re.DOTALL)
    for allowed in HONEST:
        text = text.replace(allowed, "")
    return text


def private_words(text: str) -> list[str]:
    """The words of a page that have a field term, each with the term; and sentences that begin with Who or What."""
    found = [
        f"{match[0]}: say {said}"
        for said, words in PRIVATE.items()
        for match in re.finditer(rf"\b(?:{words})\b", plain(text), re.IGNORECASE)
    ]
    labels = re.sub(r"^#[^\n]*$|\*\*.*?\*\*", "", plain(text), flags=re.MULTILINE | re.DOTALL)
    return found + [match[0].strip() for match in SUBJECT.finditer(labels)]


def found_in(pages: list[Path], look: Callable[[Path], list[str]]) -> list[str]:
    """What it finds in the pages, each with the page."""
    return [f"{page.relative_to(ROOT)}: {found}" for page in pages for found in look(page)]


def test_the_pages_use_field_terms() -> None:
    assert found_in(WORDED, lambda page: private_words(page.read_text(encoding="utf-8"))) == []


def test_a_private_word_is_found() -> None:
    """A negative control."""
    texts = [
        ("The door admits it.", 1),
        ("It goes by the policy.", 1),
        ("Nobody waits behind it.", 2),
        ("Who waits ages.", 1),
        ("It waits. What comes first is admitted.", 1),
        ("Its stay at the engine.", 1),
        ("What waits? Leases stay. `told` ```\ndoor\n``` [a panel](door.md), Who goes ahead of whom.", 0),
    ]
    assert [(text, len(private_words(text))) for text, _ in texts] == texts


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_the_docs_are_few_pages_of_few_words_beside_their_index() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages(DOCS)]
    assert len(texts) - 1 <= DOCS_PAGES
    assert sum(len(text.split()) for text in texts) <= DOCS_WORDS


def test_a_release_has_few_words_in_the_changelog() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(releases) >= 2
    assert {
        release.split()[0]: len(release.split()) for release in releases if len(release.split()) > RELEASE_WORDS
    } == {}


def leave_the_repository(page: Path) -> list[str]:
    """The links of a page to files that are not ours."""
    inside = [link.partition("#")[0] for link in links(page) if not link.startswith(ELSEWHERE)]
    return [link for link in inside if not (page.parent / unquote(link)).resolve().is_relative_to(ROOT.resolve())]


def test_every_link_inside_the_repository_leads_somewhere_and_none_leaves_it_but_by_its_address() -> None:
    assert len(PAGES) > 40
    assert found_in(PAGES, broken) == []
    assert found_in(PAGES, leave_the_repository) == []


def test_the_index_names_every_page_of_the_docs_and_the_readme_names_the_index() -> None:
    named = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md") if "://" not in link}
    written = {path.resolve() for path in DOCS.glob("*.md")} - {(DOCS / "README.md").resolve()}
    assert written - named == set()
    assert "docs/README.md" in links(ROOT / "README.md")


def test_the_picture_of_a_pool_is_that_of_the_shipped_policy() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "pool.py"))["text"]()
    assert (DOCS / "pictures" / "pool.svg").read_text(encoding="utf-8") == drawn


def test_the_lists_of_the_reference_are_those_of_the_declarations() -> None:
    script = runpy.run_path(str(DOCS / "lists.py"))
    for page in script["PAGES"]:
        assert script["current"](page) == page.read_text(encoding="utf-8"), "run: python docs/lists.py"


def test_the_page_has_every_header_that_the_middleware_reads_or_writes() -> None:
    modules = [*(ROOT / "sidecar" / "admission").rglob("*.py"), ROOT / "sidecar" / "gain" / "token_deadlines.py"]
    ours = r'b"((?:x-(?:admission|slo|llm-d|ratelimit|should|stainless|request)|retry-after|server-timing)[a-z-]*)"'
    headers = {name for module in modules for name in re.findall(ours, module.read_text(encoding="utf-8"))}
    assert len(headers) > 15
    page = (DOCS / "http.md").read_text(encoding="utf-8")
    assert {name for name in headers if f"`{name}" not in page} == set()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A negative control: the tests above can fail."""
    there = "# A part: `of` it, twice\n```sh\n# a comment\n```\n# A part [of](x.md) it, twice\n"
    (tmp_path / "there.md").write_text(there, encoding="utf-8")
    expected = {
        "[gone](gone.md)": ["gone.md"],
        "[part](there.md#no-such-part)": ["there.md#no-such-part"],
        "[own](#no-such-part)": ["#no-such-part"],
        "![picture](gone.png)": ["gone.png"],
        "[![picture](gone.png)](there.md)": ["gone.png"],
        '<img src="gone.png">': ["gone.png"],
        "[a `code` span](gone.md)": ["gone.md"],
        "[fine](there.md#a-part-of-it-twice-1), [away](https://example.com/gone), [own](#here)\n# Here": [],
        "`[code](gone.md)`\n```\n[code](gone.md)\n```": [],
        "[not a heading](there.md#a-comment)": ["there.md#a-comment"],
    }
    page = tmp_path / "page.md"

    def broken_in(text: str) -> list[str]:
        page.write_text(text, encoding="utf-8")
        return broken(page)

    assert {text: broken_in(text) for text in expected} == expected
