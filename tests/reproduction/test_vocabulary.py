import json

import pytest

from de_jax.data.stores import corpus
from de_jax.data.text import tokenizing
from de_jax.types import InputError
from reproduction import verbs

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    docs = [{"_id": f"d{i}{j}", "title": one, "text": f"{two} {one}"} for i, one in enumerate(WORDS) for j, two in enumerate(WORDS)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "queries.tsv").write_text("".join(f"q{number}\tthe {word}\n" for number, word in enumerate(WORDS)))
    return folder


@pytest.fixture
def run(tmp_path, capsys):
    def run(*arguments):
        verbs.call("encode tokens", [f"--tokenizer={tmp_path / 'vocabulary'}", f"--out_dir={tmp_path / 'stores'}", *arguments])
        return json.loads(capsys.readouterr().out)

    return run


def test_a_folder_gives_a_vocabulary_and_two_stores(tmp_path, dataset, run):
    printed = run(f"--dataset_dir={dataset}", "--train_vocab_size=30")
    tokenizer = tokenizing.load_tokenizer(tmp_path / "vocabulary")
    assert printed["vocab_size"] == tokenizer.vocab_size == 30
    docs, queries = (corpus.open_token_store(printed[name]["store_dir"]) for name in ("docs", "queries"))
    assert (docs.num_texts, queries.num_texts) == (81, 9)
    assert (printed["docs"]["texts"], printed["docs"]["tokens"]) == (81, len(docs.tokens))
    assert queries.tokens.tolist() == [token for word in WORDS for token in tokenizer.encode([f"the {word}"])[0].tolist()]
    assert docs.tokenizer_fingerprint == tokenizer.fingerprint


def test_a_second_run_makes_nothing_again(tmp_path, dataset, run):
    arguments = (f"--dataset_dir={dataset}", "--train_vocab_size=30")
    first = run(*arguments)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert run(*arguments) == first
    assert all(file.stat().st_mtime_ns == modified for file, modified in files.items())
    assert run(f"--dataset_dir={dataset}") == first


def test_one_file_of_queries_is_enough(dataset, run):
    run(f"--dataset_dir={dataset}", "--train_vocab_size=30")
    printed = run(f"--texts_file={dataset / 'queries.tsv'}", "--kind=queries")
    assert set(printed) == {"tokenizer", "vocab_size", "queries"}


def test_a_vocabulary_of_other_texts_is_not_replaced(tmp_path, dataset, run):
    run(f"--dataset_dir={dataset}", "--train_vocab_size=30")
    before = (tmp_path / "vocabulary" / "spiece.model").read_bytes()
    with pytest.raises(InputError, match="holds another vocabulary"):
        run(f"--dataset_dir={dataset}", "--train_vocab_size=28")
    assert (tmp_path / "vocabulary" / "spiece.model").read_bytes() == before


def test_bad_input_leaves_no_store(tmp_path, dataset, run):
    run(f"--dataset_dir={dataset}", "--train_vocab_size=30")
    stores = sorted(tmp_path.glob("stores/[!.]*"))
    with open(dataset / "corpus.jsonl", "a") as file:
        file.write('{"_id": "x", "text": ""}\n')
    with pytest.raises(InputError, match=r"corpus\.jsonl, line 82: the text of x is empty"):
        run(f"--dataset_dir={dataset}")
    assert sorted(tmp_path.glob("stores/[!.]*")) == stores
    assert run(f"--dataset_dir={dataset}", "--skip_empty")["docs"]["texts"] == 81


def test_inputs_that_cannot_be_are_refused_first(tmp_path, dataset, run):
    with pytest.raises(InputError, match=r"absent\.tsv does not exist"):
        run(f"--texts_file={tmp_path / 'absent.tsv'}")
    with pytest.raises(InputError, match="--train_vocab_size is 0"):
        run(f"--dataset_dir={dataset}", "--train_vocab_size=0")
    with pytest.raises(InputError, match="vocabulary of 5000 pieces: Vocabulary size too high"):
        run(f"--dataset_dir={dataset}", "--train_vocab_size=5000")
    with pytest.raises(InputError, match=r"holds neither spiece\.model nor tokenizer\.json"):
        run(f"--dataset_dir={dataset}")
    assert not (tmp_path / "stores").exists()
