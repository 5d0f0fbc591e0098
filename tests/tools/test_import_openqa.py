"""`import openqa`: from files as DPR writes them to a folder that trains and is scored by answers."""

import csv
import gzip
import json

import pytest

from de_jax import cli
from de_jax.data.text import beir
from de_jax.evaluation import answers
from de_jax.types import InputError

PASSAGES = [
    ("1", 'The "Nobel" Prize in Physics went to\nWilhelm Conrad Röntgen, first.', "Nobel Prize"),
    ("2", "Paris is the capital of France.", "Paris"),
    ("3", "The owl is a bird.\tIt hunts at night.", 'The "owl"'),
]


def question(text, *ids, name="passage_id"):
    positives = [{"title": "t", "text": "a", name: one} for one in ids]
    negatives = [{"title": "h", "text": "hard", name: "9"}]
    others = {"dataset": "nq", "answers": ["x"], "negative_ctxs": []}
    return {"question": text, "positive_ctxs": positives, "hard_negative_ctxs": negatives, **others}


@pytest.fixture
def files(tmp_path):
    """Tables by csv's writer and lists by Python's `str`, as DPR's own scripts write them."""
    with gzip.open(tmp_path / "psgs.tsv.gz", "wt", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("id", "text", "title"), *PASSAGES])
    train = [question("who got the prize ", "1", "2"), question("no passage"), question("what hunts", 3, name="psg_id")]
    (tmp_path / "train.json").write_text(json.dumps(train, indent=4))
    (tmp_path / "dev.json").write_text(json.dumps([question("where is Paris", "2")]))
    with open(tmp_path / "test.qa.csv", "w", encoding="utf-8", newline="") as file:
        rows = [
            ("who was first", ["Wilhelm Conrad Röntgen"]),
            ("which bird isn't here", ["an 'owl'", 'the "owl"']),
            ("where", ["Rome"]),
        ]
        csv.writer(file, delimiter="\t").writerows(rows)
    return tmp_path


def command(files, out_dir, **other):
    given = {"passages": "psgs.tsv.gz", "train": "train.json", "dev": "dev.json", "test": "test.qa.csv"} | other
    return [f"--out_dir={out_dir}", *(f"--{name}={files / value}" for name, value in given.items() if value)]


def test_the_folder_holds_the_passages_the_judgements_and_the_answers(files, tmp_path, capsys):
    out_dir = tmp_path / "nq"
    for more in (), ("--max_positives=2",):
        cli.call("import openqa", [*command(files, out_dir), *more])
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one == {"dataset_dir": str(out_dir), "passages": 3, "test_questions": 3, "train_pairs": 2, "dev_pairs": 1}
    assert two["train_pairs"] == 3
    texts = {doc_id: f"{title} {text}" for doc_id, text, title in PASSAGES}
    assert dict(beir.iter_docs(beir.find_file(out_dir, "corpus"))) == texts
    train = beir.read(out_dir, "train")
    assert train.queries.texts == ["who got the prize", "what hunts"]
    assert train.qrels == {"train-0": {"1": 1, "2": 1}, "train-1": {"3": 1}}
    assert beir.read(out_dir, "dev").qrels == {"dev-0": {"2": 1}}
    assert answers.read(out_dir / "answers.jsonl")["test-1"] == ["an 'owl'", 'the "owl"']


def test_a_folder_is_scored_by_its_answers(files, trained, tmp_path, capsys):
    cli.call("import openqa", command(files, tmp_path / "nq"))
    capsys.readouterr()
    cli.call("evaluate openqa", [f"--run_dir={trained}", f"--dataset_dir={tmp_path / 'nq'}", "--no_bm25"])
    scores = json.loads(capsys.readouterr().out)["dense"]
    assert scores["success@20"] == pytest.approx(1 / 3)  # quotes are words too, and no passage has 'owl' in single ones


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test.qa.csv", "who\t['a']\nwhere is it\n", r"test\.qa\.csv, line 2: not a question, a tab and a list of answers"),
        ("test.qa.csv", "who\t[]\n", r"line 1: not a question"),
        ("test.qa.csv", "who\t__import__('os').getcwd()\n", r"line 1: not a question"),
        ("train.json", json.dumps([question("who", "7")]), r"psgs\.tsv\.gz lacks 1 of the positive passages \(7\)"),
        ("train.json", json.dumps([question("who", "")]), r"question 1: a positive passage has neither passage_id nor psg_id"),
        ("train.json", json.dumps([question("who")]), r"train\.json: no question of train has a positive passage"),
        ("train.json", json.dumps([question(" ", "1")]), r"question 1: the question is empty"),
        ("train.json", '[{"question": 3}]', r"train\.json, question 1: "),
        ("dev.json", "[", r"dev\.json, line 1: "),
        ("psgs.tsv", "id\tbody\ttitle\n1\ta\tb\n", r"psgs\.tsv has no column text; DPR's passages have the columns"),
        ("psgs.tsv", "id\ttext\ttitle\n1\ta\n", r"psgs\.tsv, line 2: 2 cells for 3 columns"),
        ("psgs.tsv", "id\ttext\ttitle\n\ta\tb\n", r"psgs\.tsv, line 2: the passage has no id"),
        ("psgs.jsonl", '{"id": null, "text": 5, "title": "b"}\n', r"psgs\.jsonl, line 1: not a line of a tsv or csv file"),
        ("psgs.tsv", "", r"psgs\.tsv, line 1: no line that names the columns"),
        ("none.json", None, r"none\.json"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_and_leaves_no_folder(files, tmp_path, name, content, message):
    if content is not None:
        (files / name).write_text(content)
    option = {"psgs.tsv": "passages", "psgs.jsonl": "passages", "none.json": "train"}.get(name)
    with pytest.raises(InputError, match=message):
        cli.call("import openqa", command(files, tmp_path / "nq", **({option: name} if option else {})))
    assert not (tmp_path / "nq").exists()


def test_another_folder_is_kept(files, tmp_path):
    with pytest.raises(InputError, match=r"holds dev\.json"):
        cli.call("import openqa", command(files, files))
