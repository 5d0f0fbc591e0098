"""A model card: the README.md of an exported model, with the front matter that the Hugging Face hub reads.

Facts come from the run's folder: `recipe.json`, `origin.json` and the evaluations of the exported checkpoint. Facts missing there
are left out. The card of a model without a run describes the model, its origin and the scores that it is given. Paths of this
machine are cut to their last part.
"""

import contextlib
import json
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from de_jax import __version__
from de_jax.evaluation import verdict
from de_jax.evaluation.report import SYSTEMS, Report, kept_reports
from de_jax.evaluation.task import settings_of_run
from de_jax.files.reading import read_json
from de_jax.interop import any_model
from de_jax.interop import export as export_
from de_jax.training.run.loop import environments
from de_jax.training.run.recipe_file import origins, read_recipe_file
from de_jax.training.run.run_folder import DATA_REPORT_FILE, Run
from de_jax.types import InputError

LIBRARY = {"sentence_transformers": "sentence-transformers", "onnx": "sentence-transformers", "peft": "peft"}
TASK = {"sentence_transformers": "sentence-similarity", "onnx": "sentence-similarity"}
"""Of the hub, by format; the others are "de_jax" and "feature-extraction"."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SHOWN = {
    "optimization": ("optimizer", "schedule", "learning_rate", "num_steps", "clip_norm", "frozen"),
    "initialization": ("seed", "init_new", "init_layers"),
    "options": ("batch_size", "num_neg_docs", "mask_positives", "max_passages"),
}
"""The settings that the card's table has; the whole recipe stands below it."""


def export(
    run: Run,
    out_dir: str | Path,
    format: str,
    *,
    license: str | None = None,
    base_model: str | None = None,
    notes: Sequence[str] = (),
) -> list[str]:
    """Writes a run as `interop.export.export` does, with its card as README.md; gives the same notes.

    Args:
        license: its identifier on the hub, such as "apache-2.0"; None leaves it out.
        base_model: hub name of the original model; None for the name in the run's folder.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"the licence is {license!r}; give its identifier on the Hugging Face hub, such as apache-2.0.")
    if base_model is not None and not _HUB_NAME.fullmatch(base_model):
        raise InputError(f"the base model is {base_model!r}; give its name on the Hugging Face hub, such as google/t5-v1_1-base.")

    def card(notes: Sequence[str]) -> str:
        return model_card(run, format, name=Path(out_dir).resolve().name, notes=notes, license=license, base_model=base_model)

    return export_.export(run, out_dir, format, card=card, license=license, notes=notes)


def model_card(
    run: Run, format: str, *, name: str, notes: Sequence[str] = (), license: str | None = None, base_model: str | None = None
) -> str:
    """The card of a run in a format; see `export`."""
    recipe = {} if run.source else read_recipe_file(run.run_dir) or {}
    reports = kept_reports(run.run_dir, settings_of_run(run))
    sources = [named] if (named := base_model or run.source) else origins(run.run_dir)
    sections = {
        "Use": "\n\n".join([*_usage(run, format, name), *(f"Note: {note}." for note in notes)]),
        "Model": _model(run, sources),
        "Data": _data(recipe.get("data"), run.run_dir / DATA_REPORT_FILE),
        "Loss": _loss(recipe.get("loss")),
        "Training": _training(run, recipe),
        "Scores": "\n\n".join(filter(None, [_verdict(run), _scores(reports)])),
        "How it was made": _commands(run, recipe, format, name),
    }
    on_hub = [base_model] if base_model else [one for source in sources if (one := _name_on_hub(source))]
    head = _front_matter(format, name, on_hub, recipe.get("loss"), reports, license)
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)
    towers = "one model for queries and documents" if set(run.params) == {"shared"} else "a query tower and a document tower"
    made = "trained with" if recipe else "written by"
    return f"---\n{head}\n---\n\n# {name}\n\nA dual encoder for dense retrieval, {towers}, {made} de_jax.\n\n{body}\n"


def _front_matter(format: str, name: str, on_hub: list[str], loss: Any, reports: Sequence[Report], license: str | None) -> str:
    """YAML, as the hub's own package writes it."""
    from huggingface_hub import EvalResult, ModelCardData

    library = LIBRARY.get(format, "de_jax")
    results = [
        EvalResult(
            task_type="text-retrieval",
            task_name="Retrieval",
            dataset_type=report["dataset"],
            dataset_name=report["dataset"],
            dataset_split=report.get("split") or None,
            metric_type=_metric(measure),
            metric_name=measure,
            metric_value=round(report["dense"][measure], 4),
        )
        for report, changed, measure in _score_rows(reports)
        if not changed and "dense" in report
    ]
    own = [f"loss:{_last(loss['function'])}"] if _is_function(loss) else []
    data = ModelCardData(
        model_name=name,
        library_name=library,
        pipeline_tag=TASK.get(format, "feature-extraction"),
        tags=[library, "sentence-similarity", "feature-extraction", "dense-retrieval", "de_jax", *own],
        base_model=on_hub[0] if len(on_hub) == 1 else on_hub or None,
        license=license,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        eval_results=results or None,
    )
    if not results:
        data.model_name = None  # it stands in the index of results
    return str(data.to_yaml()).strip()


def _name_on_hub(source: str) -> str | None:
    """The whole name of a model that was fetched from the hub on this machine; None for others, as folders may be called so too."""
    from huggingface_hub import try_to_load_from_cache

    name = None if Path(source).exists() else any_model.hub_name(source)
    with contextlib.suppress(ValueError):  # a name that the hub does not allow
        return name if name and isinstance(try_to_load_from_cache(name, "config.json"), str) else None
    return None


def _metric(measure: str) -> str:
    """A measure's name as the hub spells such names.

    Example:
        >>> _metric("mrr(rel=2)@10")
        'mrr_rel_2_at_10'
    """
    return re.sub(r"\W+", "_", measure.replace("@", "_at_")).replace("__", "_").strip("_")


def _usage(run: Run, format: str, name: str) -> Iterator[str]:
    """How the folder is read, in code."""
    texts = """
queries = model.encode_query(["how high is mont blanc"])
documents = model.encode_document(["Mont Blanc is 4,806 metres high."])
scores = model.similarity(queries, documents)"""
    if format == "onnx":
        folder = f"{name}/document" if set(run.params) != {"shared"} else name
        text = json.dumps(run.doc.prompt + "Mont Blanc is 4,806 metres high.", ensure_ascii=False)
        yield _code("python", _WITH_ONNXRUNTIME.format(folder=folder, text=text, length=run.doc.max_length))
    if format in ("sentence_transformers", "onnx"):
        imported = "from sentence_transformers import SentenceTransformer"
        yield _code("python", f'{imported}\n\nmodel = SentenceTransformer("{name}"){texts}')
    if format == "serving":
        yield _code(
            "python",
            f"""
from encoder import Encoder  # {name}/encoder.py

queries = Encoder("{name}", "query")(["how high is mont blanc"])
documents = Encoder("{name}", "document")(["Mont Blanc is 4,806 metres high."])
scores = queries @ documents.T""",
        )
        return
    if format == "peft":
        yield _code(
            "python",
            f"""
import de_jax
from peft import AutoPeftModelForFeatureExtraction

encoder = AutoPeftModelForFeatureExtraction.from_pretrained("{name}")  # token vectors, for torch
model = de_jax.load("{name}")  # merged into the model that adapter_config.json names""",
        )
        return
    folder = name
    if format == "t5x":
        lengths = f"--max_query_length={run.query.max_length} --max_doc_length={run.doc.max_length}"
        start, folder = f"{name}/checkpoint_{run.step}", f"runs/{name}"
        made = f"de-jax import model --from={shlex.quote(start)} --tokenizer=spiece.model {lengths} --run_dir={shlex.quote(folder)}"
        yield "The vocabulary and the lengths are not part of a T5X checkpoint:"
        yield _code("bash", made)
    yield _code("python", f'import de_jax\n\nmodel = de_jax.load("{folder}"){texts}')


_WITH_ONNXRUNTIME = """
import numpy as np, onnxruntime, tokenizers

session = onnxruntime.InferenceSession("{folder}/onnx/model.onnx")  # or model_fp16.onnx, model_quantized.onnx (int8)
tokenizer = tokenizers.Tokenizer.from_file("{folder}/tokenizer.json")
tokenizer.no_padding()
tokenizer.enable_truncation({length})
tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
ids = np.array([tokenizer.encode({text}).ids])
documents = session.run(["sentence_embedding"], {{"input_ids": ids, "attention_mask": np.ones_like(ids)}})[0]"""


def _model(run: Run, sources: Sequence[str]) -> str:
    model, params = run.model, jax.tree.leaves(run.params)
    rows = [
        ("started from", ", ".join(f"`{_name_on_hub(source) or _last_part(source)}`" for source in sources) or "random parameters"),
        ("parameters", f"{sum(leaf.size for leaf in params):,}"),
        ("embedding dimensions", str(model.query.embedding_dim)),
        ("similarity", "cosine" if model.query.normalize and model.doc.normalize else "dot product"),
        ("shared by both towers", ", ".join(model.shared) or "nothing"),
    ]
    for tower, config, side in (("query", model.query, run.query), ("document", model.doc, run.doc)):
        encoder = config.encoder
        kind = f"{type(encoder).__name__.removesuffix('Config')}, {encoder.num_layers} layers of {encoder.model_dim}"
        prompt = f", prompt `{json.dumps(side.prompt, ensure_ascii=False)}`" if side.prompt else ""
        fields = f", fields {', '.join(side.fields)} with the end of a text between them" if side.fields else ""
        rows.append((f"{tower} tower", f"{kind}, {config.pooling} pooling, {side.max_length} tokens{prompt}{fields}"))
    return _table(("property", "value"), rows)


def _data(described: Any, report: Path) -> str:
    """The sources of training pairs, with the counts in the run's report if it counted them: streams are not counted."""
    sources = list(_sources(described))
    counted = list(read_json(report)["sources"].values()) if report.is_file() else []
    rows = []
    for source, counts in zip(sources, counted if len(counted) == len(sources) else [{}] * len(sources), strict=True):
        named = next((source[name] for name in _NAMES if source.get(name)), "")
        places = [place for place in (named if isinstance(named, list) else [named]) if isinstance(place, str)]
        name = ", ".join(map(_last_part, places)) or "rows in memory"
        sizes = (counts["pairs"], *(counts[side]["trained_on"] for side in _SIDES)) if counts else ()
        trained_on = ", ".join(f"{size:,} {of}" for size, of in zip(sizes, ("pairs", *_SIDES), strict=False))
        rows.append((name, _last(source["function"]), trained_on or "not counted"))
    return _table(("data set", "read by", "trained on"), rows) if rows else ""


_NAMES = ("dataset_dir", "path", "pairs_dir", "task")
"""The settings with the place of a source's pairs."""
_SIDES = ("queries", "documents")


def _sources(described: Any) -> Iterator[dict[str, Any]]:
    """The sources of pairs in a recipe's data, each source of a mixture."""
    inner = described.values() if isinstance(described, dict) else described if isinstance(described, list) else ()
    below = [source for value in inner for source in _sources(value)]
    if _is_function(described) and not below and _last(described["function"]).endswith("_pairs"):
        yield described
    yield from below


def _loss(described: Any) -> str:
    if not _is_function(described):
        return ""
    settings = [f"`{key} = {_value(value)}`" for key, value in described.items() if key != "function" and value is not None]
    return f"`{described['function']}`" + (f" with {', '.join(settings)}" if settings else "") + "."


def _training(run: Run, recipe: dict[str, Any]) -> str:
    if not recipe:
        return ""
    data = recipe.get("data")
    parts = {"options": data.get("options"), **recipe} if isinstance(data, dict) else recipe
    rows = [("updates done", str(run.step))]
    if records := environments(run.run_dir, run.step):
        rows.append(("trained with", trained_with(records)))
    for part, names in _SHOWN.items():
        found = parts.get(part)
        values = [(name, found.get(name)) for name in names] if isinstance(found, dict) else []
        rows += [(name.replace("_", " "), f"`{_value(value)}`") for name, value in values if value not in (None, [], {}, ())]
    whole = json.dumps(_without_paths(recipe), indent=2, ensure_ascii=False)
    folded = f"<details><summary>The whole recipe</summary>\n\n{_code('json', whole)}\n\n</details>"
    return f"{_table(('setting', 'value'), rows)}\n\n{folded}"


def trained_with(records: list[dict[str, Any]]) -> str:
    """The environments in words: "de_jax 0.2.0, Python 3.11.7, jax 0.10.2 on 1 x cpu"."""
    words = "de_jax {de_jax}, Python {python}, jax {jax} on {num_devices} x {device}"
    return "; then ".join(dict.fromkeys(words.format(**one) for one in records))


def _verdict(run: Run) -> str:
    """Whether the run's training helped, by its held-out queries, if these parameters were judged."""
    found = {} if run.source else verdict.of_run(run.run_dir) or {}
    judged = [found] if "sentence" in found else found.values()
    if not found or any(one["step"] != run.step for one in judged):
        return ""
    return "On queries held out of training, " + "\n\n".join(verdict.sentences(found))


def _scores(reports: Sequence[Report]) -> str:
    """Each measure of each data set, with its 95 % confidence interval over queries."""
    systems = [system for system in SYSTEMS if any(system in report for report in reports)]
    rows = []
    for report, changed, measure in _score_rows(reports):
        counts = (f"{report[count]:,}" for count in ("num_queries", "num_docs"))
        cells = (_score(report, system, measure) for system in systems)
        rows.append((", ".join([" ".join(_data_set(report)).strip(), *changed]), *counts, measure, *cells))
    if not rows:
        return ""
    names = {"dense": "this model", "bm25": "BM25", "fusion": "both, fused by rank"}
    table = _table(("data set", "queries", "documents", "measure", *(names[system] for system in systems)), rows)
    return f"Means over queries, with 95 % confidence intervals (Student's t) in brackets.\n\n{table}"


def _score_rows(reports: Sequence[Report]) -> list[tuple[Report, list[str], str]]:
    """The measures of each data set with the settings that set them apart; equal scores once, by the report with most systems."""
    found: dict[Any, tuple[Report, list[str], str]] = {}
    for report in reports:
        changed = _changed(report, [other for other in reports if _data_set(other) == _data_set(report)])
        systems = [system for system in SYSTEMS if system in report]
        for measure in report[systems[0]]:
            counts = (report["num_queries"], report["num_docs"])
            key = (*_data_set(report), *counts, *changed, measure, report[systems[0]][measure])
            if key not in found or len(systems) > sum(system in found[key][0] for system in SYSTEMS):
                found[key] = (report, changed, measure)
    return list(found.values())


def _data_set(report: Report) -> tuple[str, str]:
    return report["dataset"], report.get("split", "")


def _changed(report: Report, same_data: Sequence[Report]) -> list[str]:
    """The settings of a report that change the embeddings or the documents, and those in which reports on its data differ."""
    settings = report.get("settings", {})
    changed = [f"{key} {settings[key]}" for key in _SET_APART if key in settings]
    changed += [f"index {settings['index']}"] if settings.get("index", "exact") != "exact" else []
    for key, usual in _USUAL.items():
        given = {other["settings"][key] for other in same_data if key in other.get("settings", {})}
        if len(given) > 1 and settings.get(key, usual) != usual:
            changed.append(f"{key} {settings[key]}")
    return changed


_SET_APART = ("backend", "embedding_dim", "passage_length", "passage_stride", "nprobe", "ef_search", "expansion", "bm25_language")
_USUAL = {"identical_ids": "dropped", "skip_empty": False, "k1": 0.9, "b": 0.4, "dtype": "float32"}
"""Settings of a report and their defaults. Tools without BEIR's rule for identical ids keep them, which alone is no change."""


def _score(report: Report, system: str, measure: str) -> str:
    value = report.get(system, {}).get(measure)
    interval = report.get("intervals", {}).get(system, {}).get(measure)
    if value is None:
        return ""
    return f"{value:.4f}" + (f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else "")


def _commands(run: Run, recipe: dict[str, Any], format: str, name: str) -> str:
    made, run_dir = [], shlex.quote(f"runs/{run.run_dir.name}")
    if recipe:
        made.append(f"de-jax train --recipe=recipe.json --run_dir={run_dir}  # the recipe above")
    elif found := origins(run.run_dir):
        made.append(f"de-jax import model --from={shlex.quote(_last_part(found[0]))} --run_dir={run_dir}")
    opened = shlex.quote(_last_part(run.source)) if run.source else f"{run_dir} --step={run.step}"
    made.append(f"de-jax export model --run_dir={opened} --format={format} --out_dir={shlex.quote(name)}")
    versions = (f"{package} {metadata.version(package)}" for package in ("jax", "flax", "numpy"))
    written_by = ", ".join([f"de_jax {__version__}", f"Python {platform.python_version()}", *versions])
    return f"{_code('bash', chr(10).join(made))}\n\nExported with {written_by}."


def _is_function(described: Any) -> bool:
    return isinstance(described, dict) and isinstance(described.get("function"), str)


def _value(value: Any) -> str:
    """A setting in a few words: a function or class by its name."""
    if isinstance(value, dict) and isinstance(place := value.get("function") or value.get("type"), str):
        return _last(place)
    return json.dumps(_without_paths(value), ensure_ascii=False)


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _without_paths(value: Any) -> Any:
    """The same without the folders of this machine."""
    if isinstance(value, dict):
        return {key: _without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_paths(entry) for entry in value]
    return _last_part(value) if isinstance(value, str) and value.startswith(("/", "~")) else value


def _last_part(path: str) -> str:
    """The name of a folder or file; a name of the hub is whole.

    Example:
        >>> _last_part("/home/me/data/scifact/"), _last_part("google/t5-v1_1-base")
        ('scifact', 'google/t5-v1_1-base')
    """
    return path if _HUB_NAME.fullmatch(path) and not Path(path).exists() else Path(path).name


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"
