"""What `python -m release` fills in, and the links that it refuses."""

import json
import shutil
import tomllib

import pytest

import release
from de_jax.types import InputError

ADDRESS, SITE = "https://example.org/owner/de_jax", "https://owner.example.org/de_jax"


@pytest.fixture
def tree(tmp_path):
    for name in ("pyproject.toml", "mkdocs.yml", "CITATION.cff", "README.md"):
        shutil.copy(release.ROOT / name, tmp_path)
    shutil.copytree(release.ROOT / "demos", tmp_path / "demos")
    return tmp_path


def contents(tree):
    return {path.name: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_addresses_are_written_once_wherever_they_belong(tree):
    release.fill(tree, ADDRESS, SITE)
    assert release.addresses(tree) == (ADDRESS, SITE)
    assert f"repo_url: {ADDRESS}\nsite_url: {SITE}/\n" in (tree / "mkdocs.yml").read_text()
    assert f"repository-code: {ADDRESS}\n" in (tree / "CITATION.cff").read_text()
    before = contents(tree)
    release.fill(tree, ADDRESS, SITE)
    assert contents(tree) == before


@pytest.mark.parametrize(("repository", "badges"), [("https://github.com/owner/de_jax", 1), (ADDRESS, 0)])
def test_notebooks_get_a_badge_of_colab_if_the_repository_is_on_github(tree, repository, badges):
    for _ in range(2):
        release.fill(tree, repository, SITE)
        for path in (tree / "demos").glob("*.ipynb"):
            first = "".join(json.loads(path.read_text())["cells"][0]["source"])
            assert first.startswith("# ")
            assert first.count("(https://colab.research.google.com/github/owner/de_jax/blob/") == badges
            assert first.count("Open in Colab") == badges


def test_without_addresses_the_project_has_none(tree):
    assert release.addresses(release.ROOT) == release.addresses(tree)
    assert tomllib.loads((tree / "pyproject.toml").read_text())["project"]["name"] == "de-jax-retrieval"


def test_a_file_without_a_place_for_addresses_is_named(tree):
    (tree / "mkdocs.yml").write_text("site_name: x\n")
    with pytest.raises(InputError, match=r"mkdocs.yml has no lines"):
        release.fill(tree, ADDRESS, SITE)


def test_every_link_of_the_readme_is_absolute_on_the_index(tree):
    readme = release.absolute((tree / "README.md").read_text(), ADDRESS)
    assert f"]({ADDRESS}/blob/{release.TAG}/docs/index.md)" in readme
    assert not release.LINK.search(readme)
    assert release.absolute(readme, ADDRESS) == readme
    assert release.absolute("[a](#b) [c](https://d.org)", ADDRESS) == "[a](#b) [c](https://d.org)"


def test_a_relative_link_of_the_rendered_readme_is_found():
    pytest.importorskip("readme_renderer.markdown")
    assert release.relative_links("[a](docs/a.md), [b](#b), [c](https://c.org), ![d](d.png)") == ["docs/a.md", "d.png"]
