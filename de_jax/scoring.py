"""The scores of a model in Python on a data set, as the command `evaluate beir` computes them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from de_jax.evaluation import metrics, task
from de_jax.evaluation.report import averaged
from de_jax.evaluation.task import Policy
from de_jax.files import addresses
from de_jax.model import Model
from de_jax.settings import check_value
from de_jax.types import InputError


def evaluate(
    model: Model,
    dataset_dir: str | Path,
    *,
    split: str = "test",
    measures: Iterable[str] = metrics.MEASURES,
    skip_empty: bool = False,
    keep_identical_ids: bool = False,
) -> dict[str, float]:
    """A model's scores on a BEIR folder or a table, as `de-jax evaluate beir` has them; of a folder of data sets, their mean.

    Embeddings and scores are kept in the run's folder, those of other models in `DE_JAX_CACHE`: the same call is answered at once.

    Args:
        model: as `load` gives it.
        dataset_dir: `corpus.jsonl`, `queries.jsonl` and `qrels/<split>.tsv`, or a table of queries and documents.
        split: of the judgements; a table has one, whatever its name.
        measures: as ir-measures writes them.
        skip_empty: leave empty texts out, which are refused otherwise.
        keep_identical_ids: rank a document that has its query's id too, which BEIR does not.

    Returns:
        The means over the judged queries, by measure.

    Raises:
        InputError: no such data, or an unknown measure.
    """
    if not isinstance(model, Model):
        raise InputError(f"model is {type(model).__name__}; give what de_jax.load gives.")
    dataset_dir = addresses.local(dataset_dir)
    measures = measures if isinstance(measures, str) or not isinstance(measures, Iterable) else [*measures]
    check_value("measures", measures, Sequence[str])
    if not measures:
        raise InputError("measures is []; give at least one, such as 'nDCG@10'.")
    policy = Policy(
        measures=measures,
        depth=metrics.default_depth(measures),
        drop_identical_ids=not keep_identical_ids,
        skip_empty=skip_empty,
        bm25=False,
        embedding_dim=model.truncate_dim,
    )
    reports = [task.evaluate(one, policy, model.encoding) for one in task.beir_tasks(dataset_dir, split)]
    return averaged("mean", reports)["dense"] if len(reports) > 1 else reports[0]["dense"]
