"""A run as one file of arrays under this library's own names, for programs that want nothing but the numbers.

model.safetensors   float32, by path: "shared/encoder/layers_0/attention/query/kernel"
model.json          the model, the lengths and the tokenizers' folders
tokenizers/         the vocabularies
"""

from collections.abc import Sequence
from pathlib import Path

from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.files.folders import Kind
from de_jax.interop.pretrained import FILE, Origin, Pretrained, PretrainedSide, assemble, disassemble, save, stored_arrays
from de_jax.models.dual_encoder import DESCRIPTION, DualEncoder
from de_jax.settings import Maybe, PositiveInt, Record, relative
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import Run, described
from de_jax.types import Params

MODEL_FOLDER = Kind(
    "model",
    Record(
        {
            "model": DESCRIPTION,
            "tokenizers": Record({"query": relative, "doc": relative}, only=True),
            "max_query_length": PositiveInt,
            "max_doc_length": PositiveInt,
            "max_passages": Maybe(PositiveInt, 1),
        }
    ),
    make="write it with de-jax export model",
    file="model.json",
    is_bare=True,
)


def write(folder: Path, run: Run) -> None:
    """Writes a run into an existing folder; `read` gives it back bit for bit."""
    save(folder / FILE, disassemble(run.params, _origins(run.params)))
    names = {}
    for tower, side in (("query", run.query), ("doc", run.doc)):
        names[tower] = f"tokenizers/{side.tokenizer.fingerprint[:16]}"
        (folder / names[tower]).mkdir(parents=True, exist_ok=True)
        side.tokenizer.save(folder / names[tower])
    description = {
        "model": run.model.to_json(),
        "tokenizers": names,
        "max_query_length": run.query.max_length,
        "max_doc_length": run.doc.max_length,
        "max_passages": run.doc.max_passages,
    }
    MODEL_FOLDER.write_manifest(folder, description)


def read(folder: str | Path, *, ignored: Sequence[str] = (), only_sizes: bool = False) -> Pretrained:
    """What `write` wrote; `ignored` and `only_sizes` as in `huggingface.read`."""
    folder = Path(folder)
    description, model = described(MODEL_FOLDER, folder, DualEncoder.from_json)
    params = model.shapes()
    if not only_sizes:
        params = assemble(str(folder), stored_arrays(folder), _origins(params), params, ignored=ignored)
    tokenizers = {tower: load_tokenizer(folder / name) for tower, name in description["tokenizers"].items()}
    query = PretrainedSide(tokenizers["query"], description["max_query_length"])
    doc = PretrainedSide(tokenizers["doc"], description["max_doc_length"], max_passages=description["max_passages"])
    return Pretrained(model, params, query, doc)


def _origins(params: Params) -> dict[str, Origin]:
    return {path: Origin(path) for path in paths.all_paths(params)}
