"""A table wherever a data set is asked for, with the ids and scores of the BEIR folder that is made of it."""

import json

import pytest
import tiny_run
import written_tables

import de_jax
from de_jax import cli
from de_jax.demo.side_by_side import open_corpus


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A table of pairs, and the BEIR folder that import pairs makes of it."""
    folder = tmp_path_factory.mktemp("table")
    rows = [{"id": f"row{row}", "question": f"a {title}", "answer": text} for row, (_, title, text) in enumerate(tiny_run.DOCS)]
    table = written_tables.WRITERS["csv"](folder, rows)
    cli.call("import pairs", [str(table), "--format=beir", f"--out_dir={folder / 'folder' / 'a'}"])
    return table, folder / "folder" / "a"


def test_commands_do_not_know_whether_it_was_a_table(folders, trained, tmp_path, printed):
    run, found = {"run_dir": trained}, []
    for place, data in enumerate(folders):
        out, own = tmp_path / str(place), {"dataset_dir": data}
        encoded = printed("encode corpus", **run, **own, out_dir=out / "embeddings")
        scored = printed("evaluate beir", **run, **own, split="train")
        mined = printed("mine pairs", **run, **own, negatives_dir=out / "negatives", last_rank=20)
        teacher = printed("score pairs", model=trained, **own, negatives_dir=out / "negatives", out_dir=out / "scores")
        hits = printed("search", **run, **own, query="a word", k=3)["results"]
        assert all(hit["id"].startswith("row") for hit in hits)
        found.append([encoded["num_docs"], scored["dense"], scored["bm25"], mined["num_pairs"], teacher["num_scores"], hits])
    assert found[0] == found[1]


def test_every_command_with_a_data_set_takes_a_table(folders, trained, spiece, tmp_path, printed):
    table, run = folders[0], {"run_dir": trained}
    printed("evaluate sentences", dataset_dir=table, no_bm25=True, **run)
    printed("mine pairs", dataset_dir=table, bm25=True, negatives_dir=tmp_path / "bm25")
    printed("encode guide", dataset_dir=table, model=trained, out_dir=tmp_path / "guide")
    printed("export index", dataset_dir=table, to="parquet", out=tmp_path / "out.parquet", **run)
    printed("compare latency", dataset_dir=table, runs=f"tiny={trained}", num_calls=2, batch_sizes=1)
    assert next(iter(open_corpus(table).texts)) == "row0"
    scores = de_jax.evaluate(de_jax.load(trained), table, measures=["RR@10"])
    assert 0 < scores["mrr@10"] < 1
    docs = tmp_path / "docs.jsonl"
    docs.write_text(json.dumps({"text": "a word of it"}) + "\n")
    assert [hit["id"] for hit in printed("search", dataset_dir=docs, query="a word", **run)["results"]] == ["1"]
