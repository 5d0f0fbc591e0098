"""NanoBEIR from every layout that it has, scored as the BEIR folders of the same texts are."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tiny_run import DOCS, QRELS, QUERIES

from de_jax import cli
from de_jax.data.text import beir, nanobeir
from de_jax.interop import hub
from de_jax.tools import evaluate
from de_jax.types import InputError

NAMES = ("NanoNQ", "NanoSciFact")
CORPUS = [{"_id": doc_id, "text": text} for doc_id, _, text in DOCS]


def tables(number):
    """The parts of a set; sets have other queries."""
    queries = [{"_id": query_id, "text": f"{text} {'fox' * number}"} for query_id, text in QUERIES[:2]]
    judged = [
        {"query-id": query_id, "corpus-id": doc_id} for query_id, docs in QRELS["test"].items() for doc_id in list(docs)[number:]
    ]
    return {"corpus": CORPUS, "queries": queries, "qrels": [*judged, {"query-id": "d3", "corpus-id": "d3"}]}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The same two sets in every layout."""
    folder = tmp_path_factory.mktemp("nano")
    for number, name in enumerate(NAMES):
        parts = tables(number)
        for part, rows in parts.items():
            half = len(rows) // 2
            write(folder / "apart" / name / part / "train-00000-of-00002.parquet", rows[:half])
            write(folder / "apart" / name / part / "train-00001-of-00002.parquet", rows[half:])
            write(folder / "together" / part / f"{name}-00000-of-00001.parquet", rows)
        qrels = {query["_id"]: {} for query in parts["queries"]}
        for row in parts["qrels"]:
            qrels[row["query-id"]][row["corpus-id"]] = 1
        docs = [(row["_id"], "", row["text"]) for row in parts["corpus"]]
        beir.write(folder / "beir" / name, docs, [(row["_id"], row["text"]) for row in parts["queries"]], {"test": qrels})
    return {layout: folder / layout for layout in ("apart", "together", "beir")}


def test_every_layout_scores_as_the_beir_folders_do(trained, layouts, printed, capsys):
    expected = printed(
        "evaluate beir",
        run_dir=trained,
        dataset_dirs=[layouts["beir"] / name for name in NAMES],
        measures=evaluate.OF_NANOBEIR,
        keep_identical_ids=True,
    )
    for layout, folder in layouts.items():
        report = printed("evaluate nanobeir", run_dir=trained, dataset_dir=folder)
        assert [one["dataset"] for one in report["sets"]] == list(NAMES), layout
        for one, other in zip([*report["sets"], report["average"]], [*expected["sets"], expected["average"]], strict=True):
            assert {key: one[key] for key in ("dense", "bm25", "num_docs")} == {
                key: other[key] for key in ("dense", "bm25", "num_docs")
            }
            assert one["intervals"] == other["intervals"]
    means = [one["dense"]["ndcg@10"] for one in report["sets"]]
    assert means[0] != means[1]
    assert report["average"]["dense"]["ndcg@10"] == pytest.approx(np.mean(means), abs=1e-12)
    assert len(report["missing"]) == 11
    cli.call("evaluate nanobeir", [f"--run_dir={trained}", f"--dataset_dir={layouts['beir']}", "--dtype=float32"])
    told = capsys.readouterr().err
    assert "The average is not NanoBEIR's: NanoArguAna, " in told
    assert [line.split()[0] for line in told.split("\n\n")[0].splitlines()] == ["ndcg@10", *NAMES, "average"]


def test_one_set_alone_and_chosen_sets(layouts, printed, monkeypatch):
    alone = printed("evaluate nanobeir", dataset_dir=layouts["apart"] / "NanoNQ", measures="nDCG@10")
    assert [one["dataset"] for one in alone["sets"]] == ["NanoNQ"]
    chosen = printed("evaluate nanobeir", dataset_dir=layouts["together"], sets="NanoNQ", measures="nDCG@10")
    assert chosen["sets"][0]["bm25"] == alone["sets"][0]["bm25"]
    with pytest.raises(InputError, match="--sets has NanoFEVER, which is not among the sets there: NanoNQ, NanoSciFact"):
        printed("evaluate nanobeir", dataset_dir=layouts["together"], sets=["NanoFEVER", "NanoNQ"])
    asked = []
    monkeypatch.setattr(hub, "fetched_dataset", lambda *name: asked.append(name) or layouts["apart"] / "NanoNQ")
    fetched = printed("evaluate nanobeir", hub_name="zeta-alpha-ai/NanoQ", measures="nDCG@10")
    assert fetched["sets"][0]["dataset"] == "NanoQ"  # not the name of the folder in the cache
    assert asked == [("zeta-alpha-ai/NanoQ", ["*.parquet"])]


def test_a_list_of_documents_in_a_row_of_judgements_is_several(tmp_path):
    parts = tables(0) | {"qrels": [{"query-id": "q0", "corpus-id": ["d0", "d5"]}, {"query-id": "d3", "corpus-id": ["d6"]}]}
    for part, rows in parts.items():
        write(tmp_path / "NanoNQ" / part / "train-0.parquet", rows)
    (folder,) = nanobeir.beir_folders(tmp_path, tmp_path / "cache").values()
    assert beir.read_qrels(folder / "qrels" / "test.tsv") == {"q0": {"d0": 1, "d5": 1}, "d3": {"d6": 1}}


def test_what_is_no_nanobeir_is_refused_by_name(tmp_path):
    def refused(match):
        with pytest.raises(InputError, match=match):
            nanobeir.beir_folders(tmp_path / "nano", tmp_path / "cache")

    refused("nano does not exist")
    (tmp_path / "nano").mkdir()
    refused("nano holds no set of NanoBEIR")
    parts, folder = tables(0), tmp_path / "nano" / "NanoNQ"
    write(folder / "corpus" / "train-0.parquet", parts["corpus"])
    refused("holds the corpus of NanoNQ but not its queries and qrels")
    write(folder / "queries" / "train-0.parquet", parts["queries"])
    write(folder / "qrels" / "train-0.parquet", [{"query": "q0", "corpus-id": "d0"}])
    refused(r"qrels/train-0\.parquet has no column 'query-id'; it has query, corpus-id")
    write(folder / "qrels" / "train-0.parquet", [{"query-id": "q0", "corpus-id": "d0"}, {"query-id": 7, "corpus-id": "d0"}][:1])
    write(folder / "queries" / "train-0.parquet", [{"_id": "q0", "text": "a"}, {"_id": "q1", "text": None}])
    refused(r"queries/train-0\.parquet, row 2: _id and text must be texts, but it holds \('q1', None\)")
    (folder / "queries" / "train-0.parquet").write_bytes(b"PAR1 and no more")
    refused(r"queries/train-0\.parquet cannot be read as a table")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_hub_gives_the_files_or_one_sentence(monkeypatch, tmp_path):
    import huggingface_hub

    def fetch(name, **options):
        if name == "my-org/absent":
            raise OSError("404: not found. More of it")
        return json.dumps([name, options])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    found = hub.fetched_dataset("my-org/NanoBEIR", ["*.parquet"])
    assert json.loads(str(found)) == ["my-org/NanoBEIR", {"repo_type": "dataset", "allow_patterns": ["*.parquet"]}]
    with pytest.raises(InputError, match=r"does not give the data set my-org/absent \(404: not found\); check the name"):
        hub.fetched_dataset("my-org/absent", ["*.parquet"])
    with pytest.raises(InputError, match="'NanoBEIR' is no data set of the Hugging Face hub"):
        hub.fetched_dataset("NanoBEIR", ["*.parquet"])
