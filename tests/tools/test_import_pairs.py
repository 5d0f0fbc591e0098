"""`import pairs` and `import negatives`: from a csv to what every other command reads."""

import csv
import gzip
import json

import numpy as np
import pytest
import written_tables
from flat_settings import flat

from de_jax import cli, configurables
from de_jax.data.sources import pair_store
from de_jax.data.sources.pair_store import stored_pairs
from de_jax.data.sources.table_store import text_id
from de_jax.data.sources.training_set import beir_pairs
from de_jax.data.text import beir
from de_jax.evaluation import metrics
from de_jax.types import InputError

WORDS = ("fox", "whale", "wolf", "sea", "den", "red", "blue", "grey", "deep", "quick")
ROWS = [{"Question": f"{one} of the {WORDS[i - 1]}", "Answer": f"the {one} and the {WORDS[i - 3]}"} for i, one in enumerate(WORDS)]


@pytest.fixture
def qa(tmp_path):
    return written_tables.WRITERS["csv"](tmp_path, ROWS)


def printed_by(tool, argv, capsys):
    cli.call(tool, list(map(str, argv)))
    return json.loads(capsys.readouterr().out)


def test_a_csv_becomes_pairs_and_is_scored_and_searched_like_any_data_set(qa, trained, tmp_path, capsys):
    command = [qa, f"--model={trained}", "--dev_fraction=0.4", f"--out_dir={tmp_path / 'pairs'}"]
    report = printed_by("import pairs", command, capsys)
    dev_pairs = report["dev_pairs"]
    assert 0 < dev_pairs < 10
    assert report == {
        "pairs_dir": str(tmp_path / "pairs"), "queries": 10, "docs": 10, "train_pairs": 10 - dev_pairs, "dev_pairs": dev_pairs,
        "neg_docs": 0, "has_scores": False, "rows": 10, "bad_rows": 0, "columns": {"query": ["Question"], "doc": ["Answer"]},
    }  # fmt: skip
    again = printed_by("import pairs", command, capsys)
    assert again == {name: value for name, value in report.items() if name not in ("rows", "bad_rows", "columns")}
    with pytest.raises(InputError, match="pairs holds other data, or another version of it; choose another folder"):
        cli.call("import pairs", [*map(str, command), "--columns", "query=Answer", "doc=Question"])
    scores = printed_by("evaluate pairs", [f"--run_dir={trained}", f"--pairs_dir={tmp_path / 'pairs'}"], capsys)
    assert scores["num_docs"] == 10

    data = tmp_path / "data"
    command = [qa, "--format=beir", "--dev_fraction=0.4", f"--out_dir={data}"]
    assert printed_by("import pairs", command, capsys)["dev_pairs"] == dev_pairs
    assert printed_by("import pairs", command, capsys)["docs"] == 10  # written again
    drawn = set(pair_store.open_pair_store(tmp_path / "pairs").dev_qrels)
    assert {text_id(text) for text in beir.read(data, "dev").queries.texts} == drawn
    flags = [f"--run_dir={trained}", f"--dataset_dir={data}"]
    found = printed_by("evaluate beir", [*flags, "--split=dev", "--no_bm25"], capsys)
    assert found["dense"]["mrr@10"] == pytest.approx(scores["mrr@10"], rel=1e-5)
    cli.call("search", [*flags, "--query=red fox"])
    assert "the " in capsys.readouterr().out


@pytest.mark.parametrize("form", ["pairs", "beir"])
def test_a_dev_table_without_a_relevant_document_is_refused(form, trained, tmp_path):
    rows = [{"query": f"{one} of {other}", "doc": other, "label": int(one == "fox")} for one in WORDS[:2] for other in WORDS]
    path = written_tables.WRITERS["jsonl"](tmp_path, rows)
    dev = written_tables.write_lines(tmp_path / "dev.jsonl", [rows[-1], rows[-1]])
    model = [f"--model={trained}"] * (form == "pairs")
    for _ in range(2):
        with pytest.raises(InputError, match=r"/dev\.jsonl has no relevant document to score checkpoints; give another dev table"):
            cli.call("import pairs", [str(path), f"--dev_table={dev}", f"--format={form}", f"--out_dir={tmp_path / 'out'}", *model])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "dev.jsonl"]


def test_a_recipe_trains_on_the_table_itself(qa, trained):
    settings = [f"MODEL={trained}", f"table_pairs.path={str(qa)!r}", "PairsOptions.batch_size=4"]
    recipe = configurables.read_recipe(["recipes/table.gin"], settings)
    data = recipe.data()
    assert len(data.texts.pairs) + len(data.dev.qrels) == 10
    assert next(data.batches(0)).query_id.shape == (4,)


def test_what_is_missing_or_wrong_is_said_before_anything_is_written(qa, trained, tmp_path):
    out = f"--out_dir={tmp_path / 'out'}"
    for argv, message in {
        (qa, out): r"give the vocabulary: --model=<run, folder or hub name> or else --tokenizer=<file>; or write --format=beir",
        (tmp_path / "absent.csv", out, "--model=absent"): r"absent\.csv does not exist; give a table",
        (qa, out, "--format=beir", "--columns", "Answer"): r"--columns has 'Answer'; give each name once, as name=value",
        (qa, out, "--format=beir", "--columns", "query=id"): "no column|there is no column 'id' for query; there are 'Question'",
        (qa, f"--out_dir={trained}", "--format=beir"): "exists already and holds",
        (qa, out, "--format=beir", "--dev_split=test"): r"a\.csv has no splits, so not 'test' either; leave dev_split out",
        (qa, out, "--format=beir", "--split=test"): r"a\.csv has neither splits nor subsets; leave split and subset out",
        (qa, out, "--format=beir", "--model=a"): r"--model changes nothing beside --format=beir; leave one of them out",
        (qa, out, "--dev_fraction=1"): r"--dev_fraction is 1; it must be less than 1",
    }.items():
        with pytest.raises(InputError, match=message):
            cli.call("import pairs", list(map(str, argv)))
        assert not (tmp_path / "out").exists()


def test_a_column_may_be_named_for_nothing(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("query,positive,negative,label\nwho,me,you,3.5\nhow,so,or,2.5\n")
    argv = [tmp_path / "a.csv", "--format=beir", f"--out_dir={tmp_path / 'data'}", "--columns", "label=", "score=label"]
    assert printed_by("import pairs", argv, capsys)["train_pairs"] == 2
    with pytest.raises(InputError, match="--columns has 'label'; give each name once, as name=value"):
        cli.call("import pairs", [*map(str, argv[:-2]), "label"])


def test_bad_rows_are_counted_on_request(tmp_path, capsys):
    path = written_tables.write(tmp_path / "a.tsv", "a\tb\n\tc\nd\te\n")
    argv = [path, "--header=query,positive", "--format=beir", f"--out_dir={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=r"a\.tsv, line 2: the text in column 'query' is empty; .* set skip_bad_rows\."):
        cli.call("import pairs", list(map(str, argv)))
    with pytest.warns(UserWarning, match="bad rows left out: 1"):
        report = printed_by("import pairs", [*argv, "--skip_bad_rows"], capsys)
    assert (report["rows"], report["bad_rows"], report["train_pairs"]) == (3, 1, 2)


@pytest.fixture
def data(qa, tmp_path, capsys):
    printed_by("import pairs", [qa, "--format=beir", f"--out_dir={tmp_path / 'data'}"], capsys)
    return tmp_path / "data"


def mined_rows(form):
    """Two negatives of each question, as `mine_hard_negatives` of sentence-transformers writes them."""
    answers = [row["Answer"] for row in ROWS]
    negatives = [(answers[i - 1], answers[i - 2]) for i in range(10)]
    both = [(row["Question"], row["Answer"], some) for row, some in zip(ROWS, negatives, strict=True)]
    if form == "triplet":
        return [{"anchor": query, "positive": doc, "negative": one} for query, doc, some in both for one in some]
    if form == "n-tuple":
        return [{"anchor": query, "positive": doc, "negative_1": one, "negative_2": two} for query, doc, (one, two) in both]
    if form == "labeled-list":
        return [{"anchor": query, "positive": [doc, *some], "labels": [1, 0, 0]} for query, doc, some in both]
    return [
        {"anchor": query, "positive": one, "label": int(one == doc)} for query, doc, some in both for one in (doc, *some)
    ]  # labeled-pair


@pytest.mark.parametrize("form", ["triplet", "n-tuple", "labeled-list", "labeled-pair"])
def test_mined_tables_of_sentence_transformers_become_a_generation_that_training_reads(form, data, spiece, tmp_path, capsys):
    path = written_tables.WRITERS["parquet"](tmp_path, mined_rows(form))
    report = printed_by("import negatives", [path, f"--dataset_dir={data}", f"--negatives_dir={tmp_path / 'mined'}"], capsys)
    assert {name: report[name] for name in ("num_pairs", "pairs", "negatives", "unknown_pairs", "unknown_negatives")} == {
        "num_pairs": 10, "pairs": 10, "negatives": 20, "unknown_pairs": 0, "unknown_negatives": 0,
    }  # fmt: skip
    settings = {"tokenizer": str(spiece), "negatives_dir": str(tmp_path / "mined"), "batch_size": 10, "num_neg_docs": 2}
    batch = next(with_begun(flat(beir_pairs)(str(data), **settings)).batches(0))
    ids = [str(row + 1) for row in range(len(ROWS))]
    order = {f"query_{row + 1}": row for row in range(len(ROWS))}
    opened = flat(beir_pairs)(str(data), **settings)
    for query, found in zip(batch.query_id.tolist(), batch.neg_doc_ids.tolist(), strict=True):
        place = order[opened.query_ids[query]]
        assert {opened.doc_ids[row] for row in found} == {ids[place - 1], ids[place - 2]}


def with_begun(training_set):
    training_set.mined.begin()
    return training_set


def test_negatives_for_a_folder_of_pairs_are_read_by_it(qa, spiece, tmp_path, capsys):
    pairs, mined = tmp_path / "pairs", tmp_path / "mined"
    written_tables.WRITERS["csv"](tmp_path, [*ROWS, ROWS[0]])
    printed_by("import pairs", [qa, f"--tokenizer={spiece}", f"--out_dir={pairs}"], capsys)
    path = written_tables.WRITERS["jsonl"](tmp_path, mined_rows("triplet"))
    printed_by("import negatives", [path, f"--pairs_dir={pairs}", f"--negatives_dir={mined}"], capsys)
    options = {"negatives_dir": str(mined), "batch_size": 11, "num_neg_docs": 2, "unique_in_batch": False}
    batch = next(with_begun(flat(stored_pairs)(str(pairs), **options)).batches(0))
    place = batch.doc_id[:, None]  # one of them is there twice, and has its negatives each time
    np.testing.assert_array_equal(np.sort(batch.neg_doc_ids), np.sort(np.concatenate([(place - 1) % 10, (place - 2) % 10], axis=1)))


def test_a_trec_run_gives_its_best_ranks_but_for_relevant_documents(data, tmp_path, capsys):
    ids = [str(row + 1) for row in range(len(ROWS))]
    ranked = {f"query_{row + 1}": {doc: 10.0 - rank for rank, doc in enumerate(ids)} for row in range(3)}
    metrics.write_trec_run(tmp_path / "bm25.trec", ranked | {"other": {ids[0]: 1.0}})
    flags = [tmp_path / "bm25.trec", f"--dataset_dir={data}", f"--negatives_dir={tmp_path / 'mined'}"]
    report = printed_by("import negatives", [*flags, "--first_rank=2", "--depth=4"], capsys)
    assert (report["num_pairs"], report["negatives"], report["unknown_queries"]) == (3, 9, 1)
    printed_by("export negatives", [tmp_path / "mined", f"--out={tmp_path / 'mined.jsonl.gz'}"], capsys)
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / "mined.jsonl.gz").read_bytes()).splitlines()]
    with pytest.raises(InputError, match=r"--out .*mined\.jsonl\.gz is there already; choose another name, or remove it"):
        cli.call("export negatives", [str(tmp_path / "mined"), f"--out={tmp_path / 'mined.jsonl.gz'}"])
    for place, line in enumerate(lines):
        assert line["doc_id"] == ids[place]
        assert line["neg_doc_ids"] == [doc for doc in ids if doc != ids[place]][1:4]
    metrics.write_trec_run(tmp_path / "bm25.trec", {"query_1": {"unknown": 1.0}})
    with pytest.raises(InputError, match=r"that are not in .*data: 1 \(unknown\)"):
        cli.call("import negatives", list(map(str, flags)))
    with pytest.raises(InputError, match="--skip_bad_rows changes nothing beside a TREC run"):
        cli.call("import negatives", [*map(str, flags), "--skip_bad_rows"])
    with pytest.raises(InputError, match="--depth changes nothing beside a table, which has no ranks"):
        cli.call("import negatives", ["mined.csv", *map(str, flags[1:]), "--depth=4"])
    with pytest.raises(InputError, match="--split_of_pairs changes nothing beside --pairs_dir"):
        cli.call("import negatives", [str(flags[0]), "--pairs_dir=pairs", "--negatives_dir=mined", "--split_of_pairs=dev"])
    with pytest.raises(InputError, match="--first_rank 31 is beyond --depth 30"):
        cli.call("import negatives", [*map(str, flags), "--first_rank=31"])


def test_negatives_that_are_no_documents_are_refused_or_counted(data, tmp_path, capsys):
    rows = [*mined_rows("triplet")[:2], {"anchor": ROWS[0]["Question"], "positive": ROWS[0]["Answer"], "negative": "unheard of"}]
    path = written_tables.WRITERS["csv"](tmp_path, [*rows, {"anchor": "who?", "positive": "me", "negative": ROWS[1]["Answer"]}])
    flags = [path, f"--dataset_dir={data}", f"--negatives_dir={tmp_path / 'mined'}"]
    with pytest.raises(InputError, match=r"the negative 'unheard of' is not among the documents of .*data; add it there"):
        cli.call("import negatives", list(map(str, flags)))
    report = printed_by("import negatives", [*flags, "--skip_bad_rows"], capsys)
    assert {name: report[name] for name in ("num_pairs", "negatives", "unknown_pairs", "unknown_negatives")} == {
        "num_pairs": 1, "negatives": 2, "unknown_pairs": 1, "unknown_negatives": 1,
    }  # fmt: skip
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["anchor", "positive", "negative"], ["who?", "me", ROWS[1]["Answer"]]])
    with pytest.raises(
        InputError, match=r"no training pair of .* gets a negative; none is there, or they are of other texts or ids"
    ):
        cli.call("import negatives", list(map(str, flags)))
