"""A teacher's scores: what it computes by itself, after any stop, and what a folder of them refuses."""

import numpy as np
import pretrained_folders
import pytest
import tiny_run
import torch
import transformers

from de_jax import cli
from de_jax.data.batches import teacher_scores
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources import pair_store, pair_writer
from de_jax.data.sources.training_set import open_stores
from de_jax.mining import teacher
from de_jax.retrieval import encode
from de_jax.retrieval.parts import Part
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

NEGATIVES = {("q2", "d2"): ["d7", "d1", "d9"], ("q0", "d0"): ["d3"]}
SCORED = [("q2", "d2"), ("q2", "d7"), ("q2", "d1"), ("q2", "d9")]
"""The one training pair and its negatives; the other is of the test split."""


@pytest.fixture
def negatives_dir(tmp_path):
    lines = [Mined(*pair, found, []) for pair, found in NEGATIVES.items()]
    generations.write_lines(tmp_path / "negatives", 1, lines, {})
    return tmp_path / "negatives"


def read(folder):
    lines = [line.split("\t") for line in (folder / "scores.tsv").read_text().splitlines()]
    return {(query, doc): float(score) for query, doc, score in lines}


def test_a_runs_scores_are_the_inner_products_of_its_embeddings(printed, trained, dataset_dir, negatives_dir, tmp_path):
    flags = {"dataset_dir": dataset_dir, "negatives_dir": negatives_dir, "model": trained, "out_dir": tmp_path / "scores"}
    report = printed("score pairs", **flags)
    assert (report["num_queries"], report["num_docs"], report["num_scores"]) == (1, 4, 4)
    run, found = load_run(trained), read(tmp_path / "scores")
    stores = open_stores(dataset_dir, run.query.tokenizer, run.doc.tokenizer)
    queries, docs = encode.queries(run, stores[0]), encode.docs(run, stores[1])
    assert list(found) == SCORED
    for (query, doc), score in found.items():
        np.testing.assert_allclose(score, docs[stores[1].row_of(doc)] @ queries[stores[0].row_of(query)], atol=1e-6)
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {"scores.tsv", "manifest.json", "checksums.json"}
    assert printed("score pairs", **flags) == report
    pairs = np.array([[stores[0].row_of("q2"), stores[1].row_of("d2")]], np.int32)
    scored = np.array([[stores[1].row_of(doc) for doc in ("d2", "d9", "d5")]])
    of_batch = teacher_scores.of_file(tmp_path / "scores", TrainingPairs("toy", *stores, pairs))(np.array([0]), scored)
    np.testing.assert_allclose(of_batch, [[found["q2", "d2"], found["q2", "d9"], np.nan]], rtol=1e-6)


def test_jobs_that_share_the_texts_of_a_run_score_what_one_scores(printed, trained, dataset_dir, negatives_dir, tmp_path):
    flags = {"dataset_dir": dataset_dir, "negatives_dir": negatives_dir, "model": trained}
    one = printed("score pairs", **flags, out_dir=tmp_path / "one")
    for shard in ("1/2", "0/2"):
        assert printed("score pairs", **flags, out_dir=tmp_path / "many", shard=shard) == {"shard": shard}
    assert printed("score pairs", **flags, out_dir=tmp_path / "many") == {**one, "out_dir": str(tmp_path / "many")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "many").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()
    }


def test_jobs_that_share_the_pairs_write_what_one_writes(tmp_path):
    write = {"candidates": CANDIDATES, "teacher": "one", "make_score": lambda: scores_of, "pairs_per_part": 2}
    teacher.write(tmp_path / "one", **write)
    for number in (2, 0):
        teacher.write(tmp_path / "many", **write, part=Part(number, 3))
    with pytest.raises(InputError, match=r"many\.parts lacks the shards 1/3; run them"):
        teacher.write(tmp_path / "many", **write)
    teacher.write(tmp_path / "many", **write, part=Part(1, 3))
    teacher.write(tmp_path / "many", **{**write, "make_score": lambda: pytest.fail("pairs were scored again")})
    assert {path.name: path.read_bytes() for path in (tmp_path / "many").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()
    }
    assert not (tmp_path / "many.parts").exists()


def test_the_pairs_of_a_folder_of_pairs_are_scored_with_its_negatives(printed, trained, tmp_path):
    tokenizer = load_run(trained).query.tokenizer
    texts = {"query": tokenizer.encode(["red fox", "deep blue sea"]), "doc": tokenizer.encode(["the whale", "the fox"])}
    chunk = {"query_id": ["a", "b"], "doc_id": ["x", "y"], "neg_doc_ids": [["y"], []], **texts}
    source = pair_writer.PairSource("pairs", 1.0, lambda: iter([chunk]), {"query": None, "doc": None})
    pair_writer.write(tmp_path / "pairs", [source], [], {"query": tokenizer, "doc": tokenizer}, made_from="test")
    candidates = teacher.of_pair_store(tmp_path / "pairs")
    assert candidates.queries == {"a": "red fox", "b": "deep blue sea"}
    assert candidates.docs == {"x": "the whale", "y": "the fox"}
    printed("score pairs", pairs_dir=tmp_path / "pairs", model=trained, out_dir=tmp_path / "scores")
    store = pair_store.open_pair_store(tmp_path / "pairs")
    scores = teacher_scores.of_file(tmp_path / "scores", store)
    found, expected = scores(np.arange(2), np.array([[0, 1], [1, -1]])), read(tmp_path / "scores")
    np.testing.assert_allclose(found, [[expected["a", "x"], expected["a", "y"]], [expected["b", "y"], np.nan]], rtol=1e-6)


def test_a_cross_encoders_scores_are_its_logits(printed, dataset_dir, negatives_dir, tmp_path):
    tokenizer = pretrained_folders.write_tokenizer(tmp_path, "bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(**pretrained_folders.SIZES, vocab_size=20, max_position_embeddings=48, num_labels=1)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    flags = {"cross_encoder": tmp_path / "teacher", "max_length": 24, "batch_size": 3, "out_dir": tmp_path / "scores"}
    printed("score pairs", dataset_dir=dataset_dir, negatives_dir=negatives_dir, **flags)
    queries, docs = dict(tiny_run.QUERIES), {doc_id: f"{title} {text}" for doc_id, title, text in tiny_run.DOCS}
    for (query, doc), score in read(tmp_path / "scores").items():
        tokens = tokenizer(queries[query], docs[doc], return_tensors="pt", truncation=True, max_length=24)
        tokens.pop("token_type_ids", None)
        with torch.no_grad():
            np.testing.assert_allclose(score, model(**tokens).logits.item(), atol=1e-5)


CANDIDATES = teacher.Candidates({f"q{i}": "a" for i in range(5)}, {"d": "b"}, [(f"q{i}", "d") for i in range(5)])


def scores_of(pairs):
    return np.array([int(query[1:]) / 7 for query, _ in pairs])


def test_a_teacher_that_was_stopped_goes_on_and_ends_with_the_same_bytes(tmp_path):
    asked = []

    def until_third(pairs):
        asked.extend(pairs)
        if len(asked) > 3:
            raise KeyboardInterrupt
        return scores_of(pairs)

    write = {"candidates": CANDIDATES, "teacher": "one", "pairs_per_part": 2}
    with pytest.raises(KeyboardInterrupt):
        teacher.write(tmp_path / "a", make_score=lambda: until_third, **write)
    with open(tmp_path / "a" / "scores.tsv", "a") as file:
        file.write("q2\td\t0.2")  # as a kill leaves it
    asked.clear()
    with pytest.raises(
        InputError, match=r"was begun with teacher 'one', not 'another'; choose another folder or delete this one\."
    ):
        teacher.write(tmp_path / "a", make_score=lambda: scores_of, **{**write, "teacher": "another"})
    teacher.write(tmp_path / "a", make_score=lambda: lambda pairs: asked.extend(pairs) or scores_of(pairs), **write)
    assert [query for query, _ in asked] == ["q2", "q3", "q4"]
    teacher.write(tmp_path / "b", make_score=lambda: scores_of, **write)
    for name in ("scores.tsv", "manifest.json", "checksums.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    teacher.write(tmp_path / "a", make_score=lambda: pytest.fail("a complete folder was scored again"), **write)
    with pytest.raises(InputError, match="was begun with max_length None, not 9"):
        teacher.write(tmp_path / "a", make_score=lambda: scores_of, settings={"max_length": 9}, **write)
    other = CANDIDATES._replace(docs={"d": "another text"})
    with pytest.raises(InputError, match="was begun with texts"):
        teacher.write(tmp_path / "a", make_score=lambda: scores_of, **{**write, "candidates": other})


def test_scores_that_are_no_numbers_and_folders_of_others_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"the teacher's score of query q0 and document d is not a finite number\."):
        teacher.write(tmp_path / "a", CANDIDATES, "one", lambda: lambda pairs: np.full(len(pairs), np.nan))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"b exists already and holds .*; choose a folder that is absent or empty\."):
        teacher.write(tmp_path / "b", CANDIDATES, "one", lambda: scores_of)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pairs_dir=pairs", "--negatives_dir=n", "--model=m"], "--negatives_dir changes nothing beside --pairs_dir"),
        (["--pairs_dir=pairs", "--split=dev", "--model=m"], "--split changes nothing beside --pairs_dir"),
        (["--dataset_dir=d", "--max_length=9", "--model=m"], "--max_length changes nothing beside --model"),
        (["--dataset_dir=absent", "--model=m"], "absent"),
        (["--dataset_dir=absent"], "--cross_encoder or --model is missing; give one"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(flags, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        cli.call("score pairs", [*flags, f"--out_dir={tmp_path / 'scores'}"])
