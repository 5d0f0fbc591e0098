"""`de-jax import`: training data from tables, tasks, DPR's files and docstrings."""

import ast
from pathlib import Path
from typing import Any, Literal

from de_jax.arguments import Columns
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.sources import pair_store, seqio_tasks, table_store, table_texts
from de_jax.data.text import beir, dpr, pydocs
from de_jax.data.text.table_files import files_of
from de_jax.data.text.table_rows import Reading
from de_jax.data.text.tokenizing import Tokenizer, load_tokenizer
from de_jax.files import folders
from de_jax.flags import rules
from de_jax.interop.fine_tuning import pretrained_tokenizer
from de_jax.settings import LocalPath, PositiveInt, ShareBelowOne
from de_jax.types import InputError


@rules(
    beside={"format=beir": ("model", "tokenizer", "doc_tokenizer"), "dev_table": ("dev_fraction",), "dev_split": ("dev_fraction",)}
)
def import_pairs(
    tables: tuple[LocalPath, ...],
    /,
    reads: Columns,
    *,
    out_dir: Path,
    format: Literal["pairs", "beir"] = "pairs",
    dev_table: LocalPath = "",
    dev_split: str | None = None,
    dev_fraction: ShareBelowOne = 0.0,
    model: LocalPath | None = None,
    tokenizer: LocalPath | None = None,
    doc_tokenizer: LocalPath | None = None,
) -> dict[str, Any]:
    """Makes training data from a table with a column of queries and a column of documents.

    As tokens, for Recipe.data = @stored_pairs, with the vocabulary of a model or a file:

        de-jax import pairs qa.csv --model=sentence-transformers/all-MiniLM-L6-v2 --dev_fraction=0.1 --out_dir=data/qa_pairs

    As a BEIR folder for --dataset_dir of every other command, to train, search and score:

        de-jax import pairs qa.csv --format=beir --dev_fraction=0.1 --out_dir=data/qa

    Tables are csv, tsv, jsonl or a JSON list (plain or .gz), parquet, Arrow, a folder of datasets.save_to_disk or a name on the
    Hugging Face hub. docs/data.md lists the known column names. For other names:

        de-jax import pairs posts.parquet --columns query=title doc=body neg_docs=other,another --format=beir --out_dir=data/posts

    Prints one JSON object.

    Args:
        tables: a file, a datasets folder or a name on the Hugging Face hub; several are read as one.
        format: pairs: tokens for training; beir: texts for every command.
        dev_table: a table of dev pairs, to score checkpoints.
        dev_split: split of dev pairs of a datasets folder or of the hub.
        dev_fraction: or the share of the queries for the dev split (default 0).
        model: model with the vocabulary and prompts: a run, a folder or a name on the hub.
        tokenizer: or spiece.model, tokenizer.json, or a folder with either.
        doc_tokenizer: another vocabulary for documents.
    """
    if format == "pairs" and bool(model) == bool(tokenizer):
        raise InputError(
            "give the vocabulary: --model=<run, folder or hub name> or else --tokenizer=<file>; or write --format=beir."
        )
    table = reads.of(tables)
    files_of(table)  # refused before a model is fetched
    whole = pair_store.tables_of(table, dev_path=dev_table, dev_split=dev_split, dev_fraction=dev_fraction)
    read: list[Reading] = []
    if format == "beir":
        folders.require_replaceable(out_dir, beir.BEIR_KIND)
        report = {"dataset_dir": str(out_dir), **table_texts.write_beir(out_dir, whole, read)}
    else:
        report = _write_pairs(out_dir, whole, _tokenizers(model, tokenizer, doc_tokenizer), read)
    rows, bad_rows = (sum(getattr(one, name) for one in read) for name in ("num_rows", "num_bad_rows"))
    return report | ({"rows": rows, "bad_rows": bad_rows, "columns": read[0].columns} if rows else {})  # else none was read


def import_task(
    *,
    task: str,
    out_dir: Path,
    module: str = "",
    module_arg: dict[str, LocalPath] | None = None,
    split: str = "train",
    dev_task: str = "",
    dev_split: str | None = None,
    skip_empty: bool = False,
    use_cached: bool = False,
    task_cache_dir: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Writes a seqio task or mixture as tokens, for training without TensorFlow.

    de-jax import task --task=scifact --module=de_jax.tasks.beir --module_arg dataset_dir=data/beir/scifact \\
        --module_arg tokenizer=data/t5/spiece.model --dev_split=test --out_dir=data/scifact_pairs

    A recipe trains from the folder with `Recipe.data = @stored_pairs` and `stored_pairs.pairs_dir = "data/scifact_pairs"`. Existing
    parts are reused. Prints one JSON object.

    Args:
        task: a seqio task or mixture.
        module: the Python module that registers the task.
        module_arg: an argument of the module's register(); repeatable.
        split: split of the training pairs.
        dev_task: the task that scores checkpoints; default --task.
        dev_split: split of the pairs that score checkpoints; default without such pairs.
        use_cached: read the cache of seqio_cache_tasks.
        task_cache_dir: folder of that cache; repeatable.
    """
    module_args = {name: _value(value) for name, value in (module_arg or {}).items()} or None
    selection = seqio_tasks.Selection(task, split, dev_task, dev_split, use_cached, skip_empty, module, module_args)
    seqio_tasks.load_tasks(selection, task_cache_dir)
    made_from = seqio_tasks.fingerprint(selection)
    store = _open(out_dir, made_from) or seqio_tasks.export(selection, out_dir, made_from)
    report: dict[str, Any] = {"pairs_dir": str(out_dir), "pairs": len(store.pairs)}
    report |= {"tasks": {part.task: part.num_pairs for part in store.parts}}
    for name, texts in (("queries", store.query_store), ("docs", store.doc_store)):
        report[name] = {"texts": texts.num_texts, "tokens": len(texts.tokens)}
    for name, mined in (("neg_docs", store.neg_docs), ("neg_queries", store.neg_queries)):
        report[name] = 0 if mined is None else mined.shape[1]
    return report | {"dev_queries": len(store.dev_qrels or {})}


def import_openqa(
    *,
    passages: LocalPath,
    train: tuple[LocalPath, ...],
    out_dir: Path,
    dev: tuple[LocalPath, ...] = (),
    test: tuple[LocalPath, ...] = (),
    max_positives: PositiveInt = 1,
) -> dict[str, Any]:
    """Makes a BEIR folder of DPR's files for open-domain questions.

    de-jax import openqa --passages=psgs_w100.tsv.gz --train=biencoder-nq-train.json.gz --dev=biencoder-nq-dev.json.gz \\
        --test=nq-test.qa.csv --out_dir=data/dpr/nq

    Passages keep their ids. The first positive passage of each question is its judgement in qrels/train.tsv and qrels/dev.tsv. Test
    questions are judged by their answers, in answers.jsonl, which de-jax evaluate openqa reads. Several files of questions are one
    split. Passages are streamed: 21 million make 5 GB of corpus.jsonl.gz. Prints one JSON object.

    Args:
        passages: tsv with the columns id, text and title.
        train: json of training questions with their passages.
        dev: the same, of the questions that choose a checkpoint.
        test: tsv of questions and lists of answers.
        max_positives: positive passages of a question, from its first.
    """
    folders.require_replaceable(out_dir, beir.BEIR_KIND)
    questions = {"train": list(train)} | ({"dev": list(dev)} if dev else {})
    counts = dpr.write_beir(out_dir, passages=passages, questions=questions, answers=test, max_positives=max_positives)
    return {"dataset_dir": str(out_dir), **counts}


def import_pydocs(
    *, out_dir: LocalPath, max_docs: PositiveInt | None = None, no_packages: bool = False, num_processes: PositiveInt | None = None
) -> dict[str, Any]:
    """Builds a retrieval data set from the docstrings on this machine.

    de-jax import pydocs --out_dir=data/pydocs

    A query is the first sentence of a docstring; its document is the signature and the rest. In the train split, the words of the
    name and sentences of the rest are queries too. Sources are the standard library and the dependencies of de_jax. The folder has
    the BEIR layout with the splits train, dev and test. Nothing is downloaded, and no package is imported. With the same installed
    versions, a second run changes nothing. Prints one JSON object.

    Args:
        max_docs: limit the documents, to the same subset each time; reads fewer files.
        no_packages: use only the standard library, as quickstart does.
        num_processes: processes that read sources; default one per processor.
    """
    versions = pydocs.build(out_dir, max_docs=max_docs, packages=not no_packages, num_processes=num_processes)
    return {"out_dir": out_dir, **versions["counts"], "python": versions["python"], "packages": len(versions["packages"])}


def _write_pairs(out_dir: Path, tables: pair_store.Tables, tokenizers: dict[str, Tokenizer], read: list[Reading]) -> dict[str, Any]:
    """Writes a folder of pairs, unless the same was written before."""
    made_from = pair_store.fingerprint_of(tables, tokenizers)
    store = _open(out_dir, made_from) or table_store.write_pairs(out_dir, tables, tokenizers, made_from, read)
    return {
        "pairs_dir": str(out_dir),
        "queries": store.query_store.num_texts,
        "docs": store.doc_store.num_texts,
        "train_pairs": len(store.pairs),
        "dev_pairs": sum(map(len, (store.dev_qrels or {}).values())),
        "neg_docs": 0 if store.neg_docs is None else store.neg_docs.shape[1],
        "has_scores": store.scores is not None,
    }


def _open(out_dir: Path, made_from: str) -> TrainingPairs | None:
    """The output of an earlier call of the same command, or None."""
    if not out_dir.is_dir() or not any(out_dir.iterdir()):
        return None
    if not pair_store.PAIR_STORE.is_in(out_dir) or (store := pair_store.open_pair_store(out_dir)).made_from != made_from:
        raise InputError(f"{out_dir} holds other data, or another version of it; choose another folder, or remove it.")
    return store


def _tokenizers(model: str | None, tokenizer: str | None, doc_tokenizer: str | None) -> dict[str, Tokenizer]:
    if model:
        return {side: pretrained_tokenizer(source=model, tower=side)() for side in ("query", "doc")}
    return {"query": load_tokenizer(tokenizer), "doc": load_tokenizer(doc_tokenizer or tokenizer)}


def _value(text: str) -> Any:
    """A literal of Python, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
