import gzip
import importlib.metadata
import json
from pathlib import Path

import pytest

from de_jax.data.text import beir, docstrings, pydocs
from de_jax.data.text.docstrings import Docstring
from de_jax.types import InputError

NOUNS = [
    "apples",
    "berries",
    "cherries",
    "dates",
    "figs",
    "grapes",
    "lemons",
    "mangos",
    "nuts",
    "olives",
    "pears",
    "plums",
    "quinces",
]


def module_source(folder, number):
    functions = []
    for noun in NOUNS:
        rest = " ".join(f"{noun}{number}x{step}" for step in range(20)) + f" and so the {noun} of {folder} are many"
        functions.append(f'def {noun}(a, b=1):\n    """Counts the {noun} of {folder} number {number}.\n\n    {rest}\n    """\n')
    return "\n".join(functions)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Forty modules in place of the installed ones."""
    found = []
    for number in range(40):
        path = tmp_path / "src" / f"module{number:02d}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(module_source("orchard", number))
        found.append((f"fruit.module{number:02d}", path))
    (tmp_path / "src" / "broken.py").write_text("def f(:")
    found.append(("fruit.broken", tmp_path / "src" / "broken.py"))
    monkeypatch.setattr(pydocs, "_sources", lambda distributions: found)
    return found


def build(out_dir, **options):
    return pydocs.build(out_dir, progress=False, **({"num_processes": 1} | options))


def all_bytes(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_set_is_a_beir_folder_with_disjoint_splits(tmp_path, sources):
    versions = build(tmp_path / "set")
    counts = versions["counts"]
    assert counts["docs"] == 40 * len(NOUNS)
    groups, asked = {}, 0
    for split in pydocs.SPLITS:
        data = beir.read(tmp_path / "set", split)
        assert len(data.docs.ids) == counts["docs"]
        assert len(data.queries.ids) == counts[f"{split}_queries"] > 0
        assert all(judged == {query_id.partition(":")[2]: 1} for query_id, judged in data.qrels.items())
        kinds = {query_id.partition(":")[0] for query_id in data.queries.ids}
        assert kinds == ({"q", "name", "s1"} if split == "train" else {"q"})
        asked += sum(query_id.startswith("q:") for query_id in data.queries.ids)
        groups[split] = {pydocs.module_group(query_id.partition(":")[2]) for query_id in data.queries.ids}
    assert asked == counts["docs"]
    assert not groups["train"] & groups["test"]
    assert not groups["train"] & groups["dev"]
    assert not groups["dev"] & groups["test"]


def test_no_document_holds_its_query(tmp_path, sources):
    build(tmp_path / "set")
    data = beir.read(tmp_path / "set", "test")
    docs = dict(zip(*data.docs, strict=True))
    for query_id, query in zip(*data.queries, strict=True):
        assert query.rstrip(".") not in docs[query_id.removeprefix("q:")]
    assert docs["fruit.module00:figs"].startswith("fruit.module00.figs(a, b=1) figs0x0 figs0x1")


def test_any_number_of_processes_gives_the_same_bytes(tmp_path, sources):
    build(tmp_path / "one", num_processes=1)
    build(tmp_path / "two", num_processes=2)
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")


def test_fewer_documents_are_a_fixed_part_of_all_and_most_files_are_not_read(tmp_path, sources, monkeypatch):
    read = []
    read_file = docstrings.read_file
    monkeypatch.setattr(docstrings, "read_file", lambda path, module: read.append(module) or read_file(path, module))
    build(tmp_path / "all")
    assert len(read) == 41
    build(tmp_path / "some", max_docs=30)
    assert len(read) < 41 + 20
    build(tmp_path / "fewer", max_docs=15)
    ids = {name: beir.read(tmp_path / name, "train").docs.ids for name in ("all", "some", "fewer")}
    assert [len(ids["some"]), len(ids["fewer"])] == [30, 15]
    assert set(ids["fewer"]) < set(ids["some"]) < set(ids["all"])
    assert ids["some"] == sorted(ids["some"])


def test_more_documents_than_there_are_is_all_of_them(tmp_path, sources):
    assert build(tmp_path / "set", max_docs=10**6)["counts"]["docs"] == 40 * len(NOUNS)


def test_a_complete_set_is_not_built_again(tmp_path, sources, monkeypatch):
    first = build(tmp_path / "set")
    before = all_bytes(tmp_path / "set")

    def fail(*arguments):
        raise AssertionError("read the sources again")

    monkeypatch.setattr(pydocs, "_parse", fail)
    assert build(tmp_path / "set") == first
    assert all_bytes(tmp_path / "set") == before
    with pytest.raises(AssertionError, match="read the sources again"):
        build(tmp_path / "set", max_docs=10)


@pytest.mark.parametrize("name", ["corpus.jsonl.gz", "queries.jsonl", "qrels/dev.tsv"])
def test_a_damaged_or_stopped_build_is_made_whole(tmp_path, sources, name):
    build(tmp_path / "set")
    whole = all_bytes(tmp_path / "set")
    (tmp_path / "set" / name).write_bytes(b"damaged")
    build(tmp_path / "set")
    assert all_bytes(tmp_path / "set") == whole
    (tmp_path / "set" / "versions.json").write_text(json.dumps({"format": pydocs.PYDOCS.format}))
    (tmp_path / "set" / name).unlink()
    build(tmp_path / "set")
    assert all_bytes(tmp_path / "set") == whole


def test_other_versions_are_built_anew(tmp_path, sources, monkeypatch):
    build(tmp_path / "set")
    monkeypatch.setattr(pydocs, "_installed", lambda: {"numpy": "99.0"})
    assert build(tmp_path / "set")["packages"] == {"numpy": "99.0"}
    assert json.loads((tmp_path / "set" / "versions.json").read_text())["packages"] == {"numpy": "99.0"}


def test_another_data_set_is_never_replaced(tmp_path, sources):
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(InputError, match=r"exists already and holds corpus\.jsonl\.gz, which is not part of a former pydocs"):
        build(tmp_path)
    assert gzip.decompress((tmp_path / "corpus.jsonl.gz").read_bytes()) == b"{}"


@pytest.mark.parametrize("num_sources", [0, 1], ids=["no file", "no docstring"])
def test_without_sources_nothing_is_written(tmp_path, monkeypatch, sources, num_sources):
    monkeypatch.setattr(pydocs, "_sources", lambda distributions: sources[len(sources) - num_sources :])
    with pytest.raises(InputError, match="no docstring was found"):
        build(tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_equal_summaries_ids_and_near_duplicates_are_kept_once():
    def doc(doc_id, summary, rest):
        return Docstring(doc_id, summary, f"{doc_id}()", rest)

    words = [f"w{number}" for number in range(50)]
    kept = pydocs.select(
        [
            doc("b:f", "Counts the figs.", "some other text about figs in the orchard"),
            doc("a:f", "counts THE figs", "a text of its own that no other has"),
            doc("c:f", "Loads a tree from disk.", " ".join(words)),
            doc("d:f", "Loads the tree from disk.", " ".join([*words[:40], "x", *words[41:]])),
            doc("e:f", "Cuts a tree at its root.", " ".join(words[::-1])),
            doc("e:f", "Grows a tree at its top.", "the same id as the one before"),
        ]
    )
    assert [one.doc_id for one in kept] == ["a:f", "c:f", "e:f"]
    assert kept[-1].summary == "Cuts a tree at its root."


@pytest.mark.parametrize(
    ("doc_id", "group"),
    [
        ("json.decoder:JSONDecoder.decode", "json.decoder"),
        ("argparse", "argparse"),
        ("scipy.signal._filter_design:butter", "scipy.signal"),
        ("matplotlib.figure:Figure", "matplotlib.figure"),
        ("numpy", "numpy"),
        ("jax._src.numpy.lax_numpy:where", "jax._src.numpy"),
        ("jax._src.core:Jaxpr", "jax._src.core"),
        ("orbax.checkpoint._src.metadata.tree:f", "orbax.checkpoint._src.metadata"),
    ],
)
def test_modules_are_grouped_by_file_or_sub_package(doc_id, group):
    assert pydocs.module_group(doc_id) == group


def test_installed_sources_are_the_standard_library_and_the_packages_without_their_tests():
    modules = dict(pydocs._sources(pydocs._installed()))
    assert {"argparse", "json", "json.decoder", "numpy", "numpy.ma.core", "scipy.signal._filter_design"} <= set(modules)
    assert all(isinstance(path, Path) and path.is_file() for path in list(modules.values())[::50])
    assert not [module for module in modules if {"tests", "test", "_vendor"} & set(module.split(".")[:-1])]
    assert not [module for module in modules if module.split(".")[0] in ("torch", "transformers", "pip", "de_jax")]
    assert pydocs._installed()["numpy"] == importlib.metadata.version("numpy")
    assert list(modules) == sorted(modules)
    alone = dict(pydocs._sources({}))
    assert "argparse" in alone.keys() < modules.keys()
    assert not {module.partition(".")[0] for module in alone} & {"numpy", "scipy", "jax", "google"}


def test_a_docstring_has_queries_by_its_summary_name_and_sentences_in_training():
    rest = "It may have a tail. Yes. This is where it ends. Other text follows, e.g. Blanks do so. Then more follows on."
    doc = Docstring("json.decoder:JSONDecoder.raw_decode2", "Decode a JSON document.", "raw_decode2(self, s)", rest)
    assert pydocs.training_queries(doc) == {
        f"{kind}:json.decoder:JSONDecoder.raw_decode2": query
        for kind, query in (
            ("q", "Decode a JSON document."),
            ("name", "decoder json raw decode 2"),
            ("s1", "It may have a tail."),
            ("s2", "This is where it ends."),
            ("s3", "Other text follows, e.g. Blanks do so."),
        )
    }
