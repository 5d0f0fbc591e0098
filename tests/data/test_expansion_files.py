"""Expansions on disk, and the files that others released."""

import functools
import gzip
import json
import shutil

import numpy as np
import pytest
from letters import Letters

from de_jax.data.expansion.generated_queries import (
    DocQueries,
    ExpansionWriter,
    iter_released,
    read_expansion,
    read_plan,
    write_released,
)
from de_jax.data.expansion.query_store import open_queries
from de_jax.data.stores.corpus import build_token_store
from de_jax.types import InputError

DOCS = [DocQueries("d1", ["a b", "c"]), DocQueries("d0", ["a b", " ", "a b", "é\u2028x"]), DocQueries("d7", [])]


def written(folder, docs=DOCS):
    writer = ExpansionWriter(folder, {"seed": 0})
    writer.append(docs[:2])
    writer.append(docs[2:])
    writer.finish()
    return folder


def test_an_expansion_reads_as_it_was_written(tmp_path):
    assert list(read_expansion(written(tmp_path / "queries"))) == DOCS
    lines = [json.dumps({"_id": doc_id, "queries": queries}) + "\n" for doc_id, queries in DOCS]
    (tmp_path / "one.jsonl").write_text("".join(lines))
    (tmp_path / "one.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    assert list(read_expansion(tmp_path / "one.jsonl")) == list(read_expansion(tmp_path / "one.jsonl.gz")) == DOCS


def opened(path, doc_ids, folder, **options):
    texts = [(doc_id, "fox") for doc_id in doc_ids]
    docs = build_token_store(texts, Letters(), folder / f"docs-{'-'.join(doc_ids)}", progress=False)
    return open_queries(path, docs, Letters(), folder / "cache", **options)


def texts_of(queries):
    """The texts of each document, after a look at whether its tokens are as many as their letters; blank queries have none."""
    found, lengths = [queries.texts(doc) for doc in range(len(queries.counts))], np.diff(queries.offsets)
    for texts, first, count in zip(found, queries.firsts, queries.counts, strict=True):
        assert lengths[first : first + count].tolist() == [len(text) if text.strip() else 0 for text in texts]
    return found


def test_queries_of_a_corpus_stand_by_row(tmp_path):
    corpus, folder = ["d0", "d1", "d2", "d7"], written(tmp_path / "queries")
    found = opened(folder, corpus, tmp_path)
    expected = [DOCS[1].queries, ["a b", "c"], [], []]
    assert texts_of(found) == expected
    assert found.tokens.dtype == np.uint16
    assert found.content_hash == "bce40c6fb92a4c2e", "embeddings of expanded documents would be made again"
    (made,) = (tmp_path / "cache").glob("generated-*")
    before = (made / "manifest.json").stat().st_mtime_ns
    assert texts_of(opened(folder, corpus, tmp_path, only=np.array([1, 2]))) == [[], ["a b", "c"], [], []]
    assert texts_of(opened(folder, ["d1", "x"], tmp_path, is_part=True)) == [["a b", "c"], []]
    assert (made / "manifest.json").stat().st_mtime_ns == before
    (made / "texts.npy").write_bytes(b"")
    assert texts_of(opened(folder, corpus, tmp_path)) == expected


def test_what_is_incomplete_changed_or_of_another_corpus_is_refused(tmp_path):
    folder = written(tmp_path / "queries")
    with pytest.raises(InputError, match="has queries for d7, which is not a document here"):
        opened(folder, ["d0", "d1"], tmp_path)
    twice = written(tmp_path / "twice", [*DOCS, DOCS[0]])
    with pytest.raises(InputError, match=r"twice: 1 duplicate ids; 'd1' is the id of texts 1 and 4"):
        opened(twice, ["d0", "d1", "d7"], tmp_path)
    with pytest.raises(InputError, match="has no query for any document here; the expansion is for another corpus"):
        opened(folder, ["d9"], tmp_path, is_part=True)
    with pytest.raises(InputError, match="was begun with seed 0, not 1"):
        ExpansionWriter(folder, {"seed": 1})
    (folder / "part-00001.jsonl.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"part-00001.jsonl.gz has another SHA-256"):
        list(read_expansion(folder))
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="holds no complete expansion"):
        list(read_expansion(folder))
    with pytest.raises(InputError, match="exists already and holds"):
        ExpansionWriter(tmp_path, {})


def released(tmp_path, files, doc_ids=()):
    paths = []
    for name, text in files.items():
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        paths.append(tmp_path / name)
    return list(iter_released(paths, doc_ids))


def test_hub_files_are_read(tmp_path):
    lines = '{"id": "d5", "predicted_queries": ["x", "y"]}\n{"id": 7, "predicted_queries": []}\n'
    assert released(tmp_path, {"d2q.jsonl.gz": lines}) == [DocQueries("d5", ["x", "y"]), DocQueries("7", [])]


def test_tables_are_read(tmp_path):
    assert released(tmp_path, {"q.tsv": "d5\tx y\nd5\tz\nd2\tw\t1\n"}) == [
        DocQueries("d5", ["x y", "z"]),
        DocQueries("d2", ["w\t1"]),
    ]
    with pytest.raises(InputError, match=r"bad\.tsv, line 1: expected a document id, a tab and a query"):
        released(tmp_path, {"bad.tsv": "d5 x\n"})


def test_text_files_stand_beside_the_corpus_blank_lines_too(tmp_path):
    files = {"s0.txt001-10": "c0\n", "s0.txt000-10": "a0\n\n", "s1.txt000-10": "a1\nb1\n", "s1.txt001-10": "c1"}
    expected = [DocQueries("d1", ["a0", "a1"]), DocQueries("d0", ["", "b1"]), DocQueries("d7", ["c0", "c1"])]
    assert released(tmp_path, files, ["d1", "d0", "d7"]) == expected
    with pytest.raises(InputError, match=r"s0\S* has 3 lines, fewer than the corpus has documents"):
        released(tmp_path, files, ["d1", "d0", "d7", "d8"])
    with pytest.raises(InputError, match=r"s0\S* has more lines than the corpus has documents, 2"):
        released(tmp_path, files, ["d1", "d0"])


@pytest.mark.parametrize(
    "line", ["[]", '{"_id": "d"}', '{"_id": "d", "queries": "q"}', '{"queries": ["q"]}', '{"_id": true, "queries": []}', "{"]
)
def test_a_malformed_line_is_named(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text(f'{{"_id": "d", "queries": []}}\n{line}\n')
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2"):
        list(read_expansion(tmp_path / "bad.jsonl"))


def test_kinds_are_not_mixed(tmp_path):
    with pytest.raises(InputError, match="2 files of 2 kinds"):
        released(tmp_path, {"a.tsv": "d\tq\n", "a.txt": "q\n"})


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_predictions_of_a_skipped_document_are_left_out_and_a_mended_file_takes_the_folder_over(tmp_path, kind):
    corpus, predictions = tmp_path / "corpus.jsonl", tmp_path / f"predictions.{kind}"
    corpus.write_text("".join(json.dumps({"_id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(("a fox", "", "a hen"))))
    lines = [json.dumps({"_id": f"d{i}", "queries": [f"q{i}"]}) if kind == "jsonl" else f"q{i}" for i in range(3)]
    write = functools.partial(write_released, [predictions], corpus, tmp_path / "out", skip_empty=True, about={})
    predictions.write_text("\n".join([*lines, "{"]) + "\n")
    with pytest.raises(InputError, match=r"line 4|more lines"):
        write()
    predictions.write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="d1"):
        assert write() == 2
    assert list(read_expansion(tmp_path / "out")) == [DocQueries("d0", ["q0"]), DocQueries("d2", ["q2"])]


def test_files_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{i}", "text": "a fox"}) + "\n" for i in range(2)))
    files = [tmp_path / folder / "queries.tsv" for folder in ("one", "two")]
    for i, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(f"d{i}\tx\n")
    write = functools.partial(write_released, corpus=tmp_path / "corpus.jsonl", folder=tmp_path / "out", about={})
    assert write(files) == write(files) == 2
    assert isinstance(read_plan(tmp_path / "out")["predictions"], list)
    shutil.copy(files[0], tmp_path / "alone.tsv")
    write([tmp_path / "alone.tsv"], folder=tmp_path / "other")
    assert list(read_plan(tmp_path / "other")["predictions"]) == ["alone.tsv"]  # as earlier versions wrote it
    files[0].write_text("d0\tanother\n")
    for changed in (files, files[::-1]):
        with pytest.raises(InputError, match="predictions"):
            write(changed)


@pytest.mark.parametrize("size", [1, 9])
def test_predictions_have_each_document_of_the_corpus_once(tmp_path, size):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{i}", "text": "a fox"}) + "\n" for i in (2, 10, 1)))
    write = functools.partial(write_released, corpus=tmp_path / "corpus.jsonl", folder=tmp_path / "out", docs_per_part=size)
    for lines, fault in (
        ("d2\tx\nd10\ty\nd2\tz\n", "have the document d2 twice; sort the lines of a table by document"),
        ("d2\tx\nd3\ty\n", "are for d3, which is no document of .*corpus.jsonl"),
    ):
        (tmp_path / "q.tsv").write_text(lines)
        with pytest.raises(InputError, match=f"the predictions {fault}"):
            write([tmp_path / "q.tsv"], about={"table": lines})
        shutil.rmtree(tmp_path / "out")
    (tmp_path / "q.tsv").write_text("d1\tx\nd10\ty\nd10\tz\n")
    assert write([tmp_path / "q.tsv"], about={}) == 2
