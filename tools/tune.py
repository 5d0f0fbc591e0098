"""`de-jax fine_tune`, `tune` and `lighten`: from a table of pairs to a better model, or to the advice to keep the old one."""

from typing import Any

from de_jax import lightening, trials, tuning
from de_jax.flags import like
from de_jax.settings import LocalPath


@like("de_jax.tuning.fine_tune")
def fine_tune(pairs: LocalPath, /, **given: Any) -> dict[str, Any]:
    """Trains a model on pairs, and tests on held-out queries whether it is better than before.

    de-jax fine_tune qa.csv --model=all-MiniLM-L6-v2 --run_dir=runs/qa

    The pairs are a table (csv, tsv, jsonl, parquet, Arrow), a data set of the Hugging Face hub, or a folder in the BEIR layout; or
    a folder of documents alone (corpus.jsonl, or .md, .txt and .rst files), from which queries are made.
    Prints one JSON object with the scores before and after, beside BM25. In Python: `de_jax.fine_tune`.
    """
    tuned = tuning.fine_tune(pairs=pairs, **given)
    return {"run_dir": given["run_dir"], "step": tuned.run.step, "scores": tuned.scores}


@like("de_jax.trials.tune", "de_jax.tuning.fine_tune")
def tune(pairs: LocalPath, /, **given: Any) -> dict[str, Any]:
    """Searches the settings of a fine-tuning, and tests whether the best model is better than the start.

    de-jax tune qa.csv --model=all-MiniLM-L6-v2 --run_dir=runs/tune --minutes=60

    Half of the held-out queries choose, the other half judge. The better model is in <run_dir>/model; without it, keep yours.
    Prints one JSON object. In Python: `de_jax.tune`.
    """
    found = trials.tune(pairs=pairs, **given)
    return {"sentence": found.sentence, "model": found.model.origin, **found.report}


@like("de_jax.lightening.lighten", "de_jax.tuning.fine_tune")
def lighten(pairs: LocalPath, /, **given: Any) -> dict[str, Any]:
    """Trains a light query tower for an index that stays as it is, and measures its price and its gain.

    de-jax lighten qa.csv --model=runs/qa --run_dir=runs/light --layers=2

    Documents keep their embeddings, so the index of --model serves the light queries too. Prints one JSON object with nDCG@10 and
    milliseconds of both query towers. In Python: `de_jax.lighten`.
    """
    found = lightening.lighten(pairs=pairs, **given)
    return {"run_dir": given["run_dir"], "sentence": found.sentence, **found.report}
