"""`de-jax fine_tune`, `tune` and `lighten`: from a table of pairs to a better model, or to the advice to keep the old one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from de_jax import lightening, tuning
from de_jax import trials as trials_
from de_jax.settings import LocalPath, PositiveFloat, PositiveInt, Seed, ShareBelowOne
from de_jax.types import InputError


@dataclass(frozen=True)
class Start:
    """The model, the pairs and their sizes.

    Attributes:
        model: a run, a folder of another library, or a name on the Hugging Face hub.
        run_dir: the folder of the result; the same command continues after a stop.
        questions: a table of real questions with their documents, at least ten, which judges; for documents alone.
        columns: the table's columns for query, doc, neg_docs, ..., such as query=question.
        max_query_length: tokens of a query; default what 99 % of them need, up to the model's own length.
        max_doc_length: tokens of a document; default likewise.
        batch_size: pairs of an update; default 64, or fewer for few pairs.
        seed: of the order of the pairs, of dropout and of mining.
    """

    model: LocalPath
    run_dir: LocalPath
    questions: LocalPath | None = None
    columns: dict[str, str] | None = None
    max_query_length: PositiveInt | None = None
    max_doc_length: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    seed: Seed = 0


def fine_tune(
    pairs: LocalPath,
    /,
    start: Start,
    *,
    loss: Literal["in_batch_softmax", "samtone", "pair"] = "in_batch_softmax",
    negatives: Literal["mined"] | None = None,
    adapters: Literal["lora"] | None = None,
    epochs: PositiveFloat = 1.0,
    num_steps: PositiveInt | None = None,
    learning_rate: PositiveFloat | None = None,
    temperature: PositiveFloat = 0.05,
    dev_fraction: ShareBelowOne = 0.1,
) -> dict[str, Any]:
    """Trains a model on pairs, and tests on held-out queries whether it is better than before.

    de-jax fine_tune qa.csv --model=all-MiniLM-L6-v2 --run_dir=runs/qa

    The pairs are a table (csv, tsv, jsonl, parquet, Arrow), a data set of the Hugging Face hub, or a folder in the BEIR layout; or
    a folder of documents alone (corpus.jsonl, or .md, .txt and .rst files), from which queries are made.
    Prints one JSON object with the scores before and after, beside BM25. In Python: `de_jax.fine_tune`.

    Args:
        pairs: a table with a column of queries and a column of documents, a BEIR folder, or a folder of documents alone.
        loss: in_batch_softmax, samtone (with same-tower negatives), or pair.
        negatives: mined searches hard negatives before the first update and three more times.
        adapters: lora trains low-rank adapters of attention alone.
        epochs: passes over the pairs.
        num_steps: updates, in place of --epochs.
        learning_rate: the highest rate; default 2e-5, with adapters 2e-4.
        temperature: of the loss.
        dev_fraction: share of the queries that is held out.
    """
    given = {"loss": loss, "negatives": negatives, "adapters": adapters, "epochs": epochs, "num_steps": num_steps}
    given |= {"learning_rate": learning_rate, "temperature": temperature, "dev_fraction": dev_fraction}
    tuned = tuning.fine_tune(pairs=pairs, **asdict(start), **given)
    return {"run_dir": start.run_dir, "step": tuned.run.step, "scores": tuned.scores}


def tune(
    pairs: LocalPath,
    /,
    start: Start,
    *,
    minutes: PositiveFloat = 60.0,
    trials: PositiveInt = 8,
    forgetting: tuple[LocalPath, ...] = (),
    dev_fraction: ShareBelowOne = 0.2,
) -> dict[str, Any]:
    """Searches the settings of a fine-tuning, and tests whether the best model is better than the start.

    de-jax tune qa.csv --model=all-MiniLM-L6-v2 --run_dir=runs/tune --minutes=60

    Half of the held-out queries choose, the other half judge. The better model is in <run_dir>/model; without it, keep yours.
    Prints one JSON object. In Python: `de_jax.tune`.

    Args:
        pairs: a table with a column of queries and a column of documents, a BEIR folder, or a folder of documents alone.
        minutes: of training, by the speed of a probe of 20 updates; scoring comes on top.
        trials: how many settings are tried.
        forgetting: BEIR folders on which the start and the tuned models are compared too.
        dev_fraction: share of the queries that is held out.
    """
    found = trials_.tune(
        pairs=pairs, minutes=minutes, trials=trials, forgetting=forgetting, dev_fraction=dev_fraction, **asdict(start)
    )
    return {"sentence": found.sentence, "model": str(found.model.run.run_dir), **found.report}


def lighten(
    pairs: LocalPath,
    /,
    start: Start,
    *,
    layers: PositiveInt = 2,
    epochs: PositiveFloat = 3.0,
    num_steps: PositiveInt | None = None,
    learning_rate: PositiveFloat = 1e-4,
    dev_fraction: ShareBelowOne = 0.1,
) -> dict[str, Any]:
    """Trains a light query tower for an index that stays as it is, and measures its price and its gain.

    de-jax lighten qa.csv --model=runs/qa --run_dir=runs/light --layers=2

    Documents keep their embeddings, so the index of --model serves the light queries too. Prints one JSON object with nDCG@10 and
    milliseconds of both query towers. In Python: `de_jax.lighten`.

    Args:
        pairs: a table with a column of queries and a column of documents, or a BEIR folder.
        layers: of the light query tower, the model's first ones.
        epochs: passes over the pairs.
        num_steps: updates, in place of --epochs.
        learning_rate: the highest rate.
        dev_fraction: share of the queries that is held out.
    """
    given = asdict(start)
    if given.pop("questions"):
        raise InputError("--questions is for documents alone, which have no queries to learn from; leave it out.")
    if given.pop("max_doc_length"):
        raise InputError("--max_doc_length would change the embeddings of documents, which lighten keeps; leave it out.")
    given |= {"layers": layers, "epochs": epochs, "num_steps": num_steps, "learning_rate": learning_rate}
    found = lightening.lighten(pairs=pairs, dev_fraction=dev_fraction, **given)
    return {"run_dir": start.run_dir, "sentence": found.sentence, **found.report}
