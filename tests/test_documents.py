"""Training from documents alone: queries made from them, and a verdict by real questions or none."""

import csv
import itertools
import json

import pytest

import de_jax
from de_jax import documents
from de_jax.data.expansion.generated_queries import DocQueries, ExpansionWriter
from de_jax.types import InputError
from tests import tiny_run
from tests.tiny_run import WORDS

FAST = {"learning_rate": 3e-3, "num_steps": 8, "batch_size": 8, "max_query_length": 8, "max_doc_length": 16}
DOCS = [
    (f"{first} {second}", f"the {first} and the {second} of {third}")
    for first in WORDS
    for second, third in itertools.pairwise(WORDS)
]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    lines = ({"_id": f"d{row}", "title": title, "text": text} for row, (title, text) in enumerate(DOCS))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return tiny_run.write_run(tmp_path_factory.mktemp("start"), steps=(1,))


def test_sections_of_files_are_documents_under_their_headings(tmp_path):
    (tmp_path / "a.md").write_text(
        "intro text\n\n# Open a file\nopen(name)\nopens it.\n## Modes ##\nr reads.\n\nClose\n=====\nclose() ends it."
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.TXT").write_text("a note without headings")
    (tmp_path / "c.png").write_bytes(b"\x89")
    assert documents.is_alone(tmp_path)
    assert documents.read(tmp_path) == [
        ("a.md#0", "", "intro text"),
        ("a.md#1", "Open a file", "open(name) opens it."),
        ("a.md#2", "Modes", "r reads."),
        ("a.md#3", "Close", "close() ends it."),
        ("sub/b.TXT#0", "", "a note without headings"),
    ]


def test_queries_find_their_documents_and_common_ones_are_left_out(tmp_path):
    sentences = [
        f"Word{row} is here for all to see. It tells of subject{row} at some length today. Nothing more is known."
        for row in range(9)
    ]
    (tmp_path / "a.md").write_text("\n".join(f"# Introduction\n{text}" for text in sentences) + "\n# Unlike\nEvery part has one.")
    pairs = documents.pairs_of(tmp_path, last_rank=1)
    queries = [pair["query"] for pair in pairs]
    assert "Unlike" in queries
    assert queries.count("Introduction") <= 1
    asked = [pair for pair in pairs if pair["query"].startswith("It tells of")]
    assert asked
    assert all(pair["query"].split()[3] not in pair["doc"] for pair in asked if pair["query"] not in pair["doc"])
    assert documents.pairs_of(tmp_path, last_rank=1) == pairs
    assert documents.pairs_of(tmp_path, last_rank=1, seed=1) != pairs


def test_generated_queries_and_a_teacher_take_part(corpus, start, tmp_path):
    writer = ExpansionWriter(tmp_path / "generated", {})
    writer.append([DocQueries("d0", ["where is it", f"{DOCS[0][0]} of {DOCS[0][1].split()[-1]}"])])
    writer.finish()
    pairs = documents.pairs_of(corpus, generated=tmp_path / "generated", last_rank=2)
    assert any(pair["query"].endswith(DOCS[0][1].split()[-1]) and pair["doc"].startswith(DOCS[0][0]) for pair in pairs)
    assert "where is it" not in [pair["query"] for pair in pairs]
    taught = documents.pairs_of(corpus, teacher=start, last_rank=2)
    assert 0 < len(taught) < len(pairs)
    assert all(pair in pairs for pair in taught)


def test_documents_alone_train_without_a_way_to_judge_and_with_questions_with_one(corpus, start, tmp_path):
    tuned = de_jax.fine_tune(start, corpus, run_dir=tmp_path / "run", **FAST)
    assert tuned.scores["sentence"].startswith("there is no way to judge")
    with open(tmp_path / "questions.csv", "w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *((f"the {title}", f"{title} {text}") for title, text in DOCS[:12])])
    judged = de_jax.fine_tune(start, corpus, run_dir=tmp_path / "judged", questions=tmp_path / "questions.csv", **FAST)
    assert judged.scores["num_queries"] == 12
    (tmp_path / "few.csv").write_text("question,answer\nwhy,because\n")
    with pytest.raises(InputError, match=r"few\.csv holds fewer than 10 questions with documents"):
        de_jax.fine_tune(start, corpus, run_dir=tmp_path / "few", questions=tmp_path / "few.csv", **FAST)


@pytest.mark.soak
def test_a_search_from_documents_alone_trains_once(corpus, start, tmp_path):
    sizes = {"batch_size": 64, "max_query_length": 8, "max_doc_length": 16}
    found = de_jax.tune(start, corpus, run_dir=tmp_path / "tune", **sizes)
    assert found.sentence.startswith("there is no way to judge")
    assert found.model.run.run_dir == tmp_path / "tune" / "model"
