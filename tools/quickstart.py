"""`de-jax quickstart`."""

import statistics
import time
from pathlib import Path
from typing import Any

from de_jax.configurables import read_recipe
from de_jax.data.sources.training_set import open_stores
from de_jax.data.text import beir, pydocs, vocabulary_training
from de_jax.evaluation import fusion, geometry, metrics
from de_jax.evaluation.task import Policy, Task, beir_tasks, bm25_results, encoded, ranked, score
from de_jax.files import outputs, reading
from de_jax.recipe import Recipe
from de_jax.reports import plots, tables
from de_jax.retrieval import corpus_embeddings
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.index import ExactIndex
from de_jax.retrieval.searcher import Searcher
from de_jax.settings import LocalPath, PositiveInt
from de_jax.trainer import train
from de_jax.training.run.run_folder import Run, load_run
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.types import InputError

POLICY = Policy()
WEIGHTS = tuple(tenth / 10 for tenth in range(1, 10))
"""Of the model's ranking in the weighted fusion; BM25's has the rest of 1."""
VOCAB_SIZE = 8000  # few texts fill a smaller one
EXAMPLES = ("open a file that is compressed", "run a program and read its output", "the difference of two dates")


def quickstart(
    *,
    run_dir: Path = Path("runs/quickstart"),
    dataset_dir: Path | None = None,
    max_docs: PositiveInt | None = None,
    num_steps: PositiveInt | None = None,
    gin_file: LocalPath = "recipes/quickstart.gin",
) -> dict[str, Any]:
    """All of de_jax in one command: build a data set, train, index, search and score; minutes on two CPU cores, no download.

    de-jax quickstart --run_dir=runs/quickstart

    Turns the docstrings of Python's standard library into a retrieval task (query: the first sentence; document: the signature and
    the rest). Trains a tiny T5 dual encoder from random parameters. Scores it on unseen modules, beside BM25, the untrained model,
    and the fusion of the model's ranking with BM25's. Writes report.json, curves.png and embeddings.png into the run's folder.
    Repeat the command to continue after a stop. Prints one JSON object.

    Args:
        run_dir: output folder.
        dataset_dir: folder of the data set; default <run_dir>/pydocs.
        max_docs: limit the documents, for a quick look (default all, about 2,900).
        num_steps: updates; default the recipe's.
        gin_file: the recipe.
    """
    start, draws = time.monotonic(), _draws()
    folder = dataset_dir or run_dir / "pydocs"
    pydocs.build(folder, max_docs=max_docs, packages=False)
    bindings = [f"beir_pairs.dataset_dir={folder}", f"PairsOptions.tokenizer={_vocabulary(folder, run_dir / 'vocabulary')}"]
    bindings += [f"Optimization.num_steps={num_steps}"] if num_steps else []
    recipe = read_recipe([gin_file], bindings)
    summary = train(recipe, run_dir)
    run = load_run(run_dir, "best")
    dataset = beir.read(folder, "test")
    speeds = [line["pairs_per_second"] for line in read_metrics(run_dir / METRICS_FILE) if "pairs_per_second" in line]
    report = {
        **_scores(recipe, run, folder, draws),
        "steps": summary["step"],
        "seconds": round(time.monotonic() - start, 1),
        "pairs_per_s": round(statistics.median(speeds), 1),
        "num_parameters": summary["num_parameters"],
        "num_docs": len(dataset.docs.ids),
        "num_test_queries": len(dataset.queries.ids),
    }
    outputs.write_json(run_dir / "report.json", report)
    if draws:
        plots.training_curves(run_dir / METRICS_FILE, run_dir / "curves.png", title="Quickstart: a tiny T5 with SamToNe")
    _show_searches(run, folder, dataset)
    return report


def _draws() -> bool:
    """Whether the pictures can be drawn; otherwise a sentence names the extra."""
    try:
        plots.require()
    except InputError as error:
        outputs.say(f"no pictures: {error}")
        return False
    return True


def _scores(recipe: Recipe, run: Run, dataset_dir: Path, draws: bool) -> dict[str, Any]:
    """nDCG@10, MRR@10 and Recall@100 of each system on the test queries; the weight of the fusion is chosen on dev."""
    (dev,), (test,) = (beir_tasks(dataset_dir, split) for split in ("dev", "test"))
    texts, untrained = (encoded(one, test, POLICY) for one in (run, run._replace(params=recipe.init().params)))
    row_of = {doc_id: row for row, doc_id in enumerate(texts.row_ids)}
    answers = texts.docs[[row_of[next(iter(test.qrels[query_id]))] for query_id in texts.query_ids]]
    if draws:
        plots.embedding_map(texts.queries, answers, run.run_dir / "embeddings.png", title="Test queries and their documents")
    rankings = {"bm25": bm25_results(test, POLICY), "trained": ranked(texts, POLICY)}
    on_dev = {"bm25": bm25_results(dev, POLICY), "trained": ranked(encoded(run, dev, POLICY), POLICY)}
    weight = max(WEIGHTS, key=lambda weight: _means(_weighted(on_dev, weight), dev)["ndcg@10"])
    systems = {
        "bm25": rankings["bm25"],
        "untrained": ranked(untrained, POLICY),
        "trained": rankings["trained"],
        "fusion": fusion.fuse(list(rankings.values()), depth=POLICY.depth),
        "weighted_fusion": _weighted(rankings, weight),
    }
    scores = {name: _means(found, test) for name, found in systems.items()}
    head, rows = ["test", *scores["bm25"]], [[name, *(f"{one:.3f}" for one in of.values())] for name, of in scores.items()]
    outputs.say(f"\n{tables.text_table(head, rows)}\n\nweight of the model in the fusion, chosen on dev: {weight}")
    on_dev["weighted_fusion"] = _weighted(on_dev, weight)
    return {
        **scores,
        "dev": {name: _means(found, dev) for name, found in on_dev.items()},
        "model_weight": weight,
        "alignment": geometry.pair_alignment(texts.queries, answers),
        "uniformity": geometry.uniformity(answers),
    }


def _weighted(rankings: dict[str, metrics.Results], weight: float) -> metrics.Results:
    return fusion.combine([rankings["bm25"], rankings["trained"]], (1 - weight, weight), depth=POLICY.depth)


def _means(found: metrics.Results, task: Task) -> dict[str, float]:
    return metrics.means(score(found, task, POLICY))


def _show_searches(run: Run, dataset_dir: Path, dataset: beir.Dataset) -> None:
    _, docs = open_stores(dataset_dir, run.query.tokenizer, run.doc.tokenizer)
    ids, embeddings, _ = open_embeddings(corpus_embeddings.cached_docs(run, docs, dataset.name))
    searcher = Searcher(run, ids, ExactIndex(embeddings, ids), dict(zip(dataset.docs.ids, dataset.docs.texts, strict=True)))
    for query in EXAMPLES:
        outputs.say(f"\n{query}")
        for hit in searcher.search(query, 3):
            outputs.say(f"  {hit['score']:.3f}  {hit['id']}")
    outputs.say(f"\nTry your own:  de-jax search --run_dir={run.run_dir} --step=best --dataset_dir={dataset_dir}\n")


def _vocabulary(dataset_dir: Path, folder: Path) -> Path:
    """An uncased vocabulary of the training queries and their documents; it splits `raw_decode` into its words.

    Made once, and again for other documents, after a quick look at some of them for example: a run then is of another vocabulary,
    and is not continued.
    """
    made_from, mark = reading.sha256_of(beir.find_file(dataset_dir, "corpus")), folder / "corpus.sha256"
    if not (folder / "tokenizer.json").is_file() or not mark.is_file() or mark.read_text().strip() != made_from:
        outputs.say("training the vocabulary")
        train_set = beir.read(dataset_dir, "train")
        relevant = {doc_id for docs in train_set.qrels.values() for doc_id in docs}
        docs = [doc for doc_id, doc in zip(*train_set.docs, strict=True) if doc_id in relevant]
        texts = [*train_set.queries.texts, *docs]
        vocabulary_training.train_wordpiece(texts, folder / "tokenizer.json", vocab_size=min(VOCAB_SIZE, 2 * len(texts)))
        with outputs.atomic_file(mark) as temporary:
            temporary.write_text(f"{made_from}\n")
    return folder
