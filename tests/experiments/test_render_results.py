"""The pages of results are what results/*.yaml gives, and what they point to is there."""

import dataclasses
import re

import pytest

from experiments.render_results import DOCS_DIR, ROOT, draw, pages
from reproduction.result_files import Drawing, Entry, Panel, entries_of, read_all

THEMES = read_all(ROOT / "results")
PAGES = pages(THEMES)
WRITTEN_BY_HAND = {"results/costs.md", "results/plans.md"}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_pages_are_what_the_results_give():
    """Where this fails, `python -m experiments.render_results` writes them."""
    written = {str(path.relative_to(DOCS_DIR)) for path in (DOCS_DIR / "results").glob("*.md")}
    assert written - WRITTEN_BY_HAND | {"results.md"} == PAGES.keys()
    for name, text in PAGES.items():
        assert (DOCS_DIR / name).read_text(encoding="utf-8") == text


def test_a_page_shows_caveats_and_the_registered_design():
    name, entry = next((name, entry) for name, entry in entries_of(THEMES).items() if entry.caveats)
    theme = next(theme for theme in THEMES.values() if name in theme.entries)
    careless = dataclasses.replace(entry, caveats=["It was Friday."], design="experiments/matryoshka.yaml")
    changed = pages({"one": dataclasses.replace(theme, entries={**theme.entries, name: careless})})
    assert "- It was Friday." in changed["results/one.md"]
    assert "`experiments/matryoshka.yaml`" in changed["results/one.md"]


def anchors(text):
    """What a link may end with: ids, and headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="(\w+)">', text))


def test_links_and_pictures_are_there():
    links = [(name, target) for name in PAGES for target in LINK.findall(PAGES[name]) if not target.startswith("http")]
    assert links
    for name, target in links:
        path, _, anchor = target.partition("#")
        file = ((DOCS_DIR / name).parent / path).resolve() if path else DOCS_DIR / name
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def test_a_drawing_has_the_numbers_of_its_tables(tmp_path):
    name, entry = next((name, entry) for name, entry in entries_of(THEMES).items() if name == "fine_tuning")
    assert isinstance(entry, Entry)
    drawing = Drawing(["nothing", "SamToNe"], [Panel("SciFact", name, "SciFact"), Panel("MedQuAD", name, "MedQuAD", 3)])
    draw(drawing, {name: entry}, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no single row 'nobody'"):
        draw(dataclasses.replace(drawing, rows=["nobody"]), {name: entry}, tmp_path / "drawn.png")
