"""A retrieval task, and how a run does on it beside BM25 and with BM25, kept so that it is done once (`report`)."""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.data.expansion import generated_queries
from de_jax.data.stores.corpus import TokenStore, cached_token_store
from de_jax.data.text import beir, input_policy
from de_jax.data.text.beir import Qrels
from de_jax.data.text.passages import passages_of
from de_jax.evaluation import answers as answers_
from de_jax.evaluation import fusion, metrics, significance
from de_jax.evaluation.metrics import Results
from de_jax.evaluation.report import KIND, Report, keep, kept_report
from de_jax.files import folders, outputs, reading
from de_jax.files.outputs import progress_bar
from de_jax.retrieval import corpus_embeddings, encode, faiss_index
from de_jax.retrieval import expanded_search as expanded_
from de_jax.retrieval.bm25 import BM25Index
from de_jax.retrieval.embedding_files import Truncated, open_embeddings
from de_jax.retrieval.expanded_search import Expansion
from de_jax.retrieval.index import of_docs
from de_jax.retrieval.index_settings import IndexSettings
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError, Ranking

FORMAT = f"de_jax {KIND} 6"
"""Changes where the same inputs come to give another report."""


class Task(NamedTuple):
    """Documents, queries, and which documents are relevant: judgements, or strings that answer the queries."""

    name: str
    corpus: Path
    queries: Path
    qrels: Qrels
    answers: answers_.Answers | None = None
    split: str = ""

    @property
    def query_ids(self) -> list[str]:
        """The queries that count."""
        return list(self.qrels if self.answers is None else self.answers)


class Policy(NamedTuple):
    """All that decides a score beside the model, the texts and the judgements."""

    measures: Sequence[str] = metrics.MEASURES
    depth: int = 100  # documents ranked for each query
    drop_identical_ids: bool = True  # see `input_policy`, also for the next
    skip_empty: bool = False
    bm25: bool = True
    k1: float = 0.9
    b: float = 0.4
    bm25_language: str = "en"
    embedding_dim: int | None = None  # the first dimensions of the model's, as a Matryoshka model allows
    passage_length: int | None = None  # tokens; documents are ranked by their best passage
    passage_stride: int | None = None
    search: IndexSettings = IndexSettings()
    expansion: Expansion | None = None  # of the documents, for the run and for BM25


class Encoded(NamedTuple):
    """A task's texts as embeddings by a run."""

    query_ids: list[str]
    queries: Any  # [q, D]
    docs: Any  # [r, D], rows are documents or passages
    row_ids: list[str]  # of each row the document's id; that of passages one after another
    folder: Path  # of the embeddings, and of indexes made of them


def beir_tasks(dataset_dir: str | Path, split: str) -> list[Task]:
    """The task of a BEIR folder or a table, or those of sub-folders where a folder has no corpus itself, as CQADupStack's."""
    folder = beir.folder_of(dataset_dir).resolve()
    parts = [child for child in sorted(folder.iterdir()) if (child / "qrels").is_dir()] if folder.is_dir() else []
    if parts and not (folder / "qrels").is_dir():
        return [task._replace(name=f"{folder.name}-{task.name}") for part in parts for task in beir_tasks(part, split)]
    qrels = beir.read_qrels(beir.find_qrels(dataset_dir, split))
    return [Task(folder.name, beir.find_file(folder, "corpus"), beir.find_file(folder, "queries"), qrels, split=split)]


def beir_task(dataset_dir: str | Path, split: str) -> Task:
    """The task of a BEIR folder that holds one data set; InputError for several, or as of `beir_tasks`."""
    task, *others = beir_tasks(dataset_dir, split)
    if others:
        raise InputError(f"{dataset_dir} holds {1 + len(others)} data sets; give the folder of one.")
    return task


def evaluate(task: Task, policy: Policy, run: Run | None = None) -> Report:
    """The scores of a run on a task, from its folder where they were computed before; without a run, those of BM25.

    Raises:
        InputError: texts that cannot be used, judgements of unknown texts, options that do not fit.
    """
    if policy.drop_identical_ids:
        input_policy.tell_identical(task.name, task.qrels)
    if run is None:
        return _score(task, policy, None)[0]
    folder = run.run_dir / "evaluations" / f"{task.name}-{_key(task, policy, run)}"
    open_kept = functools.partial(kept_report, names=metrics.names_of(policy.measures))

    def build(folder: Path) -> Report:
        report, results = _score(task, policy, run)
        keep(folder, report, results, name=f"{run.run_dir.name}-{run.step}")
        return open_kept(folder)

    return {**folders.build_once(folder, open_kept, build), "evaluation_dir": str(folder)}


def encoded(run: Run, task: Task, policy: Policy) -> Encoded:
    """A task's embeddings by a run; those of the corpus are kept in the run's folder. Raises InputError: see `evaluate`."""
    query_store, doc_store = stores(run, task, policy)
    query_ids = _query_ids(task, query_store.ids, query_store.skipped_ids)
    metrics.check_ids(itertools.chain(query_ids, doc_store.ids))  # before hours of encoding: rankings are kept as TREC run files
    expanded = expanded_.texts(run, doc_store, policy.expansion) if policy.expansion else None
    passages = expanded or passages_of(doc_store, run.doc, policy.passage_length, policy.passage_stride)
    store = passages or doc_store
    with progress_bar(total=store.num_texts, desc=f"encode {task.name}", unit=" docs", delay=0.5) as bar:
        name = task.corpus.parent.name  # several tasks share a corpus
        folder = corpus_embeddings.cached_docs(run, store, name, max_length=policy.passage_length, progress=bar.update)
    row_ids, docs, _ = open_embeddings(folder)
    if passages and policy.expansion and policy.expansion.is_typical:
        docs = expanded_.typical(docs, passages.doc_rows, normalize=policy.expansion.normalizes(run))
        row_ids, folder = list(doc_store.ids), folder / policy.expansion.form
    queries: Any = encode.queries(run, query_store, rows=query_store.rows_of(query_ids))
    if policy.embedding_dim:
        docs = Truncated(docs, policy.embedding_dim, normalize=run.model.doc.normalize)  # type: ignore[assignment]
        queries = Truncated(queries, policy.embedding_dim, normalize=run.model.query.normalize)[:]
        folder = folder / f"first_{policy.embedding_dim}"
    return Encoded(query_ids, queries, docs, row_ids, folder)


def ranked(texts: Encoded, policy: Policy) -> Results:
    """The ranking of a task's documents by their embeddings."""
    build = faiss_index.index_builder(policy.search)
    index, doc_ids = of_docs(build(texts.docs, texts.row_ids, texts.folder), texts.row_ids)
    return _cut(index.search(texts.queries, min(policy.depth + 1, len(doc_ids))), texts.query_ids, doc_ids, policy)


def bm25_results(task: Task, policy: Policy) -> Results:
    """The ranking of a task's documents by BM25, whole documents always."""
    index, queries, doc_ids = bm25_index(task, policy)
    return _cut(index.search(list(queries.values()), min(policy.depth + 1, len(doc_ids))), list(queries), doc_ids, policy)


def bm25_index(task: Task, policy: Policy) -> tuple[BM25Index, dict[str, str], list[str]]:
    """An index of a task's documents, the queries that count, by id, and the documents' ids."""
    docs, _ = beir.read_texts(task.corpus, with_title=True, skip_empty=policy.skip_empty)
    queries, empty = beir.read_texts(task.queries, with_title=False, skip_empty=policy.skip_empty)
    query_ids, texts = _query_ids(task, queries.ids, empty), dict(zip(*queries, strict=True))
    if policy.expansion:
        expanded = generated_queries.words(policy.expansion.path, docs.ids, docs.texts, policy.expansion.num_queries)
        docs = docs._replace(texts=expanded)
    index = BM25Index(docs.texts, docs.ids, k1=policy.k1, b=policy.b, language=policy.bm25_language)
    return index, {one: texts[one] for one in query_ids}, docs.ids


def score(results: Results, task: Task, policy: Policy) -> dict[str, dict[str, float]]:
    """The measures of each query, by judgements or by answer strings; see `metrics.score_results`."""
    qrels = task.qrels
    if task.answers is not None:
        texts = {doc_id for docs in results.values() for doc_id in docs}
        found = {doc_id: text for doc_id, text in beir.iter_queries(task.corpus, skip_empty=True) if doc_id in texts}
        qrels = answers_.judge(results, found, task.answers)
    return metrics.score_results(results, qrels, measures=policy.measures)


def _score(task: Task, policy: Policy, run: Run | None) -> tuple[Report, dict[str, Results]]:
    num_docs = beir.count_docs(task.corpus, (doc_id for docs in task.qrels.values() for doc_id in docs))
    results: dict[str, Results] = {}
    cost: dict[str, Any] = {}
    if run:
        texts = encoded(run, task, policy)
        start = time.perf_counter()
        results["dense"] = ranked(texts, policy)
        milliseconds = 1000 * (time.perf_counter() - start) / len(texts.query_ids)
        cost = {"num_vectors": len(texts.row_ids), "bytes": 4 * len(texts.row_ids) * texts.queries.shape[1]}
        cost["search_ms_per_query"] = round(milliseconds, 3)  # of all queries at once, the index made among it
    if policy.bm25 or not run:
        results["bm25"] = bm25_results(task, policy)
    if len(results) == 2:
        results["fusion"] = fusion.fuse(list(results.values()), depth=policy.depth)
    report: Report = {"dataset": task.name, "split": task.split, "num_docs": num_docs, "num_queries": len(task.query_ids)}
    values = {system: score(found, task, policy) for system, found in results.items()}
    report |= {"settings": _settings(policy, run)} | {system: metrics.means(of_queries) for system, of_queries in values.items()}
    if all(len(of_queries) > 1 for of_queries in values.values()):
        for name, of_mean in (("intervals", significance.confidence_interval), ("half_widths", significance.half_width)):
            report[name] = {
                system: {measure: of_mean([query[measure] for query in of_queries.values()]) for measure in report[system]}
                for system, of_queries in values.items()
            }
    return report | ({"cost": cost} if policy.expansion and cost else {}), results


def stores(run: Run, task: Task, policy: Policy) -> tuple[TokenStore, TokenStore]:
    """A task's queries and documents as tokens of a run's vocabularies."""
    store = functools.partial(cached_token_store, cache_dir=outputs.cache_dir() / "token_stores", skip_empty=policy.skip_empty)
    return store(task.queries, run.query.tokenizer, kind="queries"), store(task.corpus, run.doc.tokenizer)


def _query_ids(task: Task, known: Sequence[str], empty: Sequence[str]) -> list[str]:
    """The queries that count and have a text, in the order of the queries file."""
    counted = set(task.query_ids)
    beir.require_known(counted, [*known, *empty], f"{task.name}: judged queries that are not in {task.queries}")
    return [query_id for query_id in known if query_id in counted]


def _cut(ranking: Ranking, query_ids: list[str], doc_ids: Sequence[str], policy: Policy) -> Results:
    """A ranking one document deeper than asked, because one may have been dropped."""
    found = metrics.results_of(ranking, query_ids, doc_ids, drop_identical_ids=policy.drop_identical_ids)
    return {query_id: dict(itertools.islice(docs.items(), policy.depth)) for query_id, docs in found.items()}


def settings_of_run(run: Run) -> dict[str, Any]:
    """The settings of a report that are the run's own."""
    lengths: dict[str, Any] = {"max_query_length": run.query.max_length, "max_doc_length": run.doc.max_length}
    lengths["max_passages"] = run.doc.max_passages if run.doc.max_passages > 1 else None
    prompts = {"query_prompt": run.query.prompt, "doc_prompt": run.doc.prompt, "doc_fields": run.doc.fields}
    return {"step": run.step, **lengths, **{name: value or None for name, value in prompts.items()}}


def _settings(policy: Policy, run: Run | None) -> dict[str, Any]:
    """The settings that a reader of the scores needs; settings that do not apply are left out."""
    settings: dict[str, Any] = {"measures": list(policy.measures), "depth": policy.depth, "skip_empty": policy.skip_empty}
    settings["identical_ids"] = "dropped" if policy.drop_identical_ids else "kept"
    if policy.bm25 or not run:
        settings |= {"k1": policy.k1, "b": policy.b}
        settings |= {} if policy.bm25_language == "en" else {"bm25_language": policy.bm25_language}
    if run:
        settings |= settings_of_run(run) | {"dtype": run.model.dtype}
        settings |= {name: getattr(policy, name) for name in ("embedding_dim", "passage_length", "passage_stride")}
        settings |= {"index": policy.search.index, "backend": None if run.backend == "jax" else run.backend}
    if policy.expansion:
        settings["expansion"] = policy.expansion._asdict() | {"path": generated_queries.fingerprint(policy.expansion.path)}
    if run and policy.search.index != "exact":
        settings |= dataclasses.asdict(policy.search.alone())
    return {name: value for name, value in settings.items() if value is not None}


def _key(task: Task, policy: Policy, run: Run) -> str:
    """A key of everything that the scores depend on: towers, texts with vocabularies, judgements and settings."""
    models = [encode.tower_hash(run, tower) for tower in ("query", "doc")]
    texts = [store.content_hash for store in stores(run, task, policy)]
    texts += map(reading.sha256_of, (task.corpus, task.queries))  # BM25 reads words that a vocabulary may not tell apart
    judgements = json.dumps(task.qrels if task.answers is None else task.answers, sort_keys=True)
    settings = json.dumps(_settings(policy, run), sort_keys=True)
    return folders.key_of(FORMAT, task.split, *models, *texts, judgements, settings)
