"""A BEIR folder as a trainer opens it: what it is refused for, and what the divergence of towers is measured on."""

import gzip
import itertools
import shutil

import numpy as np
import pytest
import tiny_run
import toy_run
from flat_settings import flat

from de_jax.data.sources.pair_store import table_pairs
from de_jax.data.sources.training_set import beir_pairs
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import PromptedTokenizer, load_tokenizer, prompt_of, with_prompt
from de_jax.data.text.vocabulary_training import train_sentencepiece
from de_jax.types import InputError


@pytest.fixture
def folder(tmp_path):
    tiny_run.write_dataset(tmp_path / "data")
    train_sentencepiece(
        [f"{a} {b} the of and" for a in tiny_run.WORDS for b in tiny_run.WORDS], tmp_path / "spiece.model", vocab_size=30
    )
    return tmp_path


def queries_for_both(folder, **settings):
    data = flat(beir_pairs)(
        dataset_dir=str(folder / "data"),
        tokenizer=str(folder / "spiece.model"),
        cache_dir=str(folder / "cache"),
        batch_size=1,
        num_for_both=5,
        **settings,
    )
    return {data.query_ids[int(row)] for row in np.asarray(data.for_both.rows)}


def test_the_prompt_of_queries_goes_before_documents_only_where_that_is_said(folder):
    tokenizer = PromptedTokenizer(load_tokenizer(folder / "spiece.model"), "query: ")
    settings = {"dataset_dir": str(folder / "data"), "cache_dir": str(folder / "cache"), "batch_size": 1, "tokenizer": tokenizer}
    with pytest.raises(InputError, match=r"puts 'query: ' before texts, .* set PairsOptions\.doc_tokenizer, or doc_prompt"):
        flat(beir_pairs)(**settings)
    for more, prompt in (({"doc_prompt": ""}, ""), ({"doc_prompt": "a: "}, "a: "), ({"doc_tokenizer": tokenizer}, "query: ")):
        data = flat(beir_pairs)(**settings, **more)
        assert (prompt_of(data.query.tokenizer), prompt_of(data.doc.tokenizer)) == ("query: ", prompt)


def test_towers_are_compared_on_dev_queries_wherever_there_is_a_dev_split(folder):
    assert queries_for_both(folder) == set(tiny_run.QRELS["train"])
    qrels = {**tiny_run.QRELS, "dev": {"d3": {"d6": 1}}}
    beir.write(folder / "data", tiny_run.DOCS, tiny_run.QUERIES, qrels)
    assert queries_for_both(folder) == {"d3"}
    assert queries_for_both(folder, dev_split="test") == set(tiny_run.QRELS["test"])


def test_batches_hold_as_much_of_a_text_as_training_reads(folder):
    settings = {"dataset_dir": str(folder / "data"), "tokenizer": str(folder / "spiece.model"), "batch_size": 1}
    settings["cache_dir"] = str(folder / "cache")
    lengths = {"max_query_length": 8, "max_doc_length": 16}
    read = flat(beir_pairs)(**settings, **lengths, trained_query_length=4, trained_doc_length=6)
    short = flat(beir_pairs)(**settings, max_query_length=4, max_doc_length=6)
    assert (read.query.max_length, read.doc.max_length) == (8, 16)
    assert read.counts[""]["documents"]["cut_at"] == 6
    for ours, theirs in itertools.islice(zip(read.batches(0), short.batches(0), strict=True), 3):
        np.testing.assert_array_equal(ours.query.tokens, theirs.query.tokens)
        np.testing.assert_array_equal(ours.doc.tokens, theirs.doc.tokens)
    assert flat(beir_pairs)(**settings, **lengths, trained_doc_length=99).counts[""]["documents"]["cut_at"] == 16
    with pytest.raises(InputError, match="trained_doc_length is set, but max_passages splits documents at max_doc_length"):
        flat(beir_pairs)(**settings, **lengths, trained_doc_length=6, max_passages=2)


def write_bytes_tokenizer(folder, texts):
    """A vocabulary of bytes, in which the first word of a text has other tokens than the same word within one."""
    import tokenizers

    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["[PAD]", "[SEP]"], initial_alphabet=alphabet, show_progress=False
    )
    vocabulary.train_from_iterator(texts, trainer)
    vocabulary.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "prompts", [{}, {"query_prompt": "the ", "doc_prompt": "of the "}, {"query_prompt": "of ", "doc_prompt": "of "}]
)
@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_queries_are_taken_out_of_their_documents_which_stay_the_same_documents(folder, kind, prompts):
    words = tiny_run.WORDS
    docs = [(f"d{row}", "", f"{a} and {b} of the {a}") for row, (a, b) in enumerate(itertools.pairwise(words))]
    queries = [(f"q{row}", text.partition(" of ")[0]) for row, (_, _, text) in enumerate(docs)] + [("other", "the the")]
    qrels = {f"q{row}": {f"d{row}": 1} for row in range(len(docs))} | {"other": {"d0": 1}}
    beir.write(folder / "data", docs, queries, {"train": qrels})
    if kind == "bytes":
        write_bytes_tokenizer(folder, [text for _, _, text in docs])
    vocabulary = folder / ("spiece.model" if kind == "sentencepiece" else "tokenizer.json")
    shared = {"dataset_dir": str(folder / "data"), "cache_dir": str(folder / "cache"), "tokenizer": str(vocabulary), **prompts}
    settings = {**shared, "batch_size": 2, "max_query_length": 64, "max_doc_length": 64, "pack": False}
    opened = [flat(beir_pairs)(**settings, drop_query=share) for share in (0.0, 0.999999)]
    decode = load_tokenizer(vocabulary).decode
    for whole, cut in itertools.islice(zip(*(data.batches(0) for data in opened), strict=True), 2 * len(docs)):
        for name in ("query", "query_id", "doc_id"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(cut, name))
        for texts in zip(*([line[line > 1] for line in part] for part in (cut.query, whole.doc, cut.doc)), strict=True):
            query, before, after = (one.strip() for one in decode(texts))
            query, prompt = query.removeprefix(prompts.get("query_prompt", "")), prompts.get("doc_prompt", "")
            body = before.removeprefix(prompt)
            assert after.split() == f"{prompt}{body.removeprefix(query)}".split()
            assert body.startswith(query) == (query != "the the")
    without = {name: value for name, value in settings.items() if not name.endswith("prompt")}
    with pytest.raises(InputError, match=r"drop_query is 0\.5, but max_passages is over 1; set drop_query to 0"):
        flat(beir_pairs)(**without, max_passages=2, drop_query=0.5)


def test_queries_of_a_folder_that_would_not_be_scored_are_trained_on(folder):
    qrels = {"q0": {"d0": 1}, "q2": {"d2": 1}, "d3": {"d6": 1}}
    beir.write(folder / "data", tiny_run.DOCS, tiny_run.QUERIES, {"train": qrels})
    settings = {"dataset_dir": str(folder / "data"), "tokenizer": str(folder / "spiece.model"), "cache_dir": str(folder / "cache")}
    data = flat(beir_pairs)(**settings, batch_size=1, dev_fraction=0.999, dev_max_queries=1)
    asked = {data.query_ids[row] for row in data.texts.pairs[:, 0]}
    assert len(data.dev.qrels) == 1
    assert asked == qrels.keys() - data.dev.qrels.keys()


@pytest.mark.parametrize("prompts", [{}, {"query_prompt": "the: ", "doc_prompt": "of: "}])
def test_towers_are_compared_on_the_queries_of_a_table_too(folder, prompts):
    texts = [text for _, text in tiny_run.QUERIES]
    rows = [{"query": text, "doc": tiny_run.DOCS[0][2]} for text in texts]
    options = {"tokenizer": str(folder / "spiece.model"), "cache_dir": str(folder / "cache"), "batch_size": 1, **prompts}
    both = flat(table_pairs)(rows, num_for_both=3, **options).for_both
    doc_tokenizer = with_prompt(load_tokenizer(folder / "spiece.model"), prompts.get("doc_prompt"))
    assert len(set(both.rows.tolist())) == 3
    for row in both.rows.tolist():
        tokens, offsets = both.for_doc_tower.tokens, both.for_doc_tower.offsets
        np.testing.assert_array_equal(tokens[offsets[row] : offsets[row + 1]], doc_tokenizer.encode([texts[row]])[0])


@pytest.fixture(scope="module")
def toy_dir(tmp_path_factory):
    return toy_run.write_dataset(tmp_path_factory.mktemp("beir") / "toy")


@pytest.fixture
def opened(toy_dir, tmp_path):
    """Opens the toy data with other settings."""

    def opened(**changes):
        given = {"dataset_dir": str(toy_dir), "tokenizer": str(toy_dir / "spiece.model"), "cache_dir": str(tmp_path / "cache")}
        return flat(beir_pairs)(**{**given, "batch_size": 16, "dev_split": "dev", **changes})

    return opened


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataset_dir": "/nowhere"}, "/nowhere"),
        ({"tokenizer": "/nowhere/spiece.model"}, "/nowhere/spiece.model"),
        ({"split": "tune"}, "has no split 'tune'; it has dev, train"),
        ({"batch_size": 88}, "batch_size 88 is more than the 80 training pairs"),
        ({"max_doc_length": 1}, "max_doc_length of 1 leaves no room beside the 1 special tokens"),
        ({"max_query_length": 1}, "max_query_length of 1 leaves no room"),
    ],
)
def test_settings_that_do_not_suit_the_folder_are_refused(opened, changes, sentence):
    """Before a run's folder is made."""
    with pytest.raises(InputError, match=sentence):
        opened(**changes)


def rewrite_corpus(change):
    def apply(folder):
        path = beir.find_file(folder, "corpus")
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        path.unlink()
        (folder / "corpus.jsonl").write_text("\n".join(change(lines)) + "\n")

    return apply


def truncate(folder):
    path = beir.find_file(folder, "corpus")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (truncate, r"corpus\.jsonl\.gz"),
        (rewrite_corpus(lambda lines: [*lines[:4], '{"_id": "d4", "te', *lines[5:]]), r"corpus\.jsonl, line 5"),
        (rewrite_corpus(lambda lines: [*lines, lines[0]]), "d0"),
        (rewrite_corpus(lambda lines: lines[:40]), "40"),
        (rewrite_corpus(lambda lines: ['{"_id": "d0", "text": ""}', *lines[1:]]), r"corpus\.jsonl, line 1"),
        (lambda folder: (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\n"), r"train\.tsv, line 2"),
    ],
    ids=["truncated", "malformed", "duplicate id", "unknown ids", "empty text", "qrels without score"],
)
def test_a_broken_folder_is_refused_with_file_and_line(opened, toy_dir, tmp_path, change, sentence):
    folder = tmp_path / "broken"
    shutil.copytree(toy_dir, folder)
    change(folder)
    with pytest.raises(InputError, match=sentence):
        opened(dataset_dir=str(folder))
