"""A run folder's own description, so that a tool needs one flag and cannot mismatch model, vocabulary and lengths.

<run_dir>/run.json            the model, the tokenizers' folders and the maximum lengths
          origin.json         where the parameters came from, of a run that `de-jax import model` made
          unused.safetensors  arrays of another library's model that no embedding depends on, for exports
          recipe.json         every setting that was in effect, see `Recipe.load`
          data.json           fingerprints of the texts, pairs and dev sets that it is trained on
          data_report.json    counts of the texts, cut and left out ones too
          environment.json    versions and devices, from which step on
          tokenizers/         the tokenizers of the texts
          checkpoints/<step>  the newest ones      best/<step>  the best one by the dev score
          mining/<step>       a copy, while machines mine with it together
          base/0              of a run with adapters, the parameters that no update changes; checkpoints have the rest
          metrics.jsonl       the curves           tensorboard/ the same for TensorBoard
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from de_jax.data.text.tokenizing import Side, Tokenizer, load_tokenizer
from de_jax.files import addresses
from de_jax.files.folders import Kind, atomic_dir
from de_jax.files.outputs import atomic_file, write_json
from de_jax.models.dual_encoder import DESCRIPTION, TRAINING_SETTINGS, DualEncoder
from de_jax.models.tower import TowerConfig
from de_jax.settings import Maybe, PositiveInt, Record, file_name, nullable, of_class
from de_jax.training.mesh import distributed, sharding
from de_jax.training.optim import paths
from de_jax.training.run.checkpoint import BASE_DIR, Checkpoints, read_base
from de_jax.training.run.run_log import METRICS_FILE
from de_jax.training.step.adapters import Lora
from de_jax.types import Array, Backend, InputError, Params, TrainState

T = TypeVar("T")
_REMOVAL_SECONDS, _SHARED_SECONDS = 1.0, 10.0
RECIPE_FILE, DATA_FILE, DATA_REPORT_FILE = "recipe.json", "data.json", "data_report.json"
ORIGIN_FILE = "origin.json"
UNUSED_FILE = "unused.safetensors"
CHECKPOINTS_DIR = "checkpoints"
BEST_DIR = "best"
MINING_DIR = "mining"
LOCK_FILE = ".train.lock"
_WRITTEN_LATER = (
    *(CHECKPOINTS_DIR, BEST_DIR, BASE_DIR, METRICS_FILE, RECIPE_FILE, DATA_FILE),
    *(DATA_REPORT_FILE, "environment.json", "tensorboard"),
)
"""By a trainer, after the description of its run."""
MODEL_FILES = ("modules.json", "config.json", "adapter_config.json", "model.json")
"""By which models of other formats are known, the deciding one first; `run.json` beside them would hide them."""
_CONTINUED: contextvars.ContextVar[Path | None] = contextvars.ContextVar("continued", default=None)
RUN = Kind(
    "run",
    Record(
        {
            "model": DESCRIPTION,
            "max_query_length": PositiveInt,
            "max_doc_length": PositiveInt,
            "max_passages": Maybe(PositiveInt, 1),
            "adapters": Maybe(nullable(of_class(Lora)), None),
            "tokenizers": Record({"query": file_name, "doc": file_name}),
        }
    ),
    make="give the folder of a training run",
    otherwise="use the recipe it was started with, or another run_dir",
    file="run.json",
    is_bare=True,
)


class Run(NamedTuple):
    """A model with all that is needed to embed text with it: the one type of a loaded model, whatever it was opened from."""

    run_dir: Path  # results computed with the model are kept there
    step: int
    model: DualEncoder
    params: Params
    query: Side
    doc: Side
    source: str | None = None  # the folder or the name on the hub of another library's model
    notes: tuple[str, ...] = ()  # what was assumed about it, in sentences for the user
    unused: Mapping[str, Array] = {}  # arrays of its source that no embedding depends on, for exports
    prompts: Mapping[str, str] = {}  # by name, of tasks too, as its source has them
    backend: Backend = "jax"  # what encodes

    def side(self, tower: str) -> Side:
        """How a tower ("query" or "doc") reads its texts."""
        return {"query": self.query, "doc": self.doc}[tower]

    def tower(self, tower: str) -> tuple[TowerConfig, Params]:
        """A tower with its parameters, shared ones too."""
        config = {"query": self.model.query, "doc": self.model.doc}[tower]
        return config, {**self.params.get("shared", {}), **self.params.get(tower, {})}


@contextlib.contextmanager
def only_trainer(run_dir: str | Path) -> Iterator[None]:
    """Holds the folder of a run for one trainer; if several processes train together, the first one does it for all.

    Raises:
        InputError: another trainer is at work there, or the processes have copies of their own of a run in a bucket.
    """
    lock = Path(run_dir) / LOCK_FILE
    with addresses.only_one(lock, f"training in {run_dir}") if distributed.is_first() else contextlib.nullcontext():
        if addresses.address_of(run_dir):
            distributed.agreed(True)  # the first process has fetched the run again
            if not distributed.all_agree(_appears(lock)):
                raise InputError(
                    f"the processes that train in {run_dir} have copies of their own; set DE_JAX_CACHE to a folder that all of "
                    "them see."
                )
        yield


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes soon, as the file system of several hosts may take a while."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while not (is_there := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_there


def describe_run(run_dir: str | Path, *, model: DualEncoder, query: Side, doc: Side, adapters: Lora | None = None) -> None:
    """As `describe`, for the run of a dual encoder."""
    run_dir = Path(run_dir)
    description = {
        "model": model.to_json(),
        "max_query_length": query.max_length,
        "max_doc_length": doc.max_length,
        "max_passages": doc.max_passages,
        "tokenizers": {"query": query.tokenizer.fingerprint, "doc": doc.tokenizer.fingerprint},
        "adapters": dataclasses.asdict(adapters) if adapters else None,
    }
    describe(RUN, run_dir, description, DualEncoder.from_json, [side.tokenizer for side in (query, doc)])


def describe(
    kind: Kind, run_dir: Path, description: dict[str, Any], make: Callable[[dict[str, Any]], Any], tokenizers: Iterable[Tokenizer]
) -> None:
    """Writes the description of a run and the tokenizers that it names, or checks that an existing description is equal.

    A run without a checkpoint, whose first start failed, is described again.

    Raises:
        InputError: as `described`; the folder holds another run (names the first difference), or files that a
            run would replace but no description.
    """
    has_steps = any(complete_steps(run_dir / name) for name in (CHECKPOINTS_DIR, BEST_DIR))
    if kind.is_in(run_dir) and has_steps:
        there, model = described(kind, run_dir, make)
        kind.require_same(run_dir, {**there, "model": model.to_json()}, without(description))
    elif distributed.is_first():
        check_new(run_dir, kind)
        kind.check(description)
        for tokenizer in tokenizers:
            keep_tokenizer(run_dir, tokenizer)
        kind.write_manifest(run_dir, description)


def check_new(run_dir: Path, kind: Kind = RUN) -> None:
    """Refuses a folder that holds no run, but files that one would replace or hide."""
    others = () if kind.is_in(run_dir) else (*_WRITTEN_LATER, *MODEL_FILES)
    if foreign := next((name for name in others if (run_dir / name).exists()), None):
        raise InputError(f"{run_dir} holds {foreign} but no {kind.file}, so it cannot be continued; take another run_dir.")


def described(kind: Kind, folder: Path, make: Callable[[dict[str, Any]], T]) -> tuple[dict[str, Any], T]:
    """The manifest of a folder of this kind, and the model under its "model", which `make` (the class's `from_json`) makes.

    Raises:
        InputError: as `Kind.read_manifest`, or settings of the model exclude each other; names the file.
    """
    description = kind.read_manifest(folder)
    try:
        return description, make(description["model"])
    except InputError as error:
        raise InputError(f"{folder / kind.file}: {error}") from None


def without(described: Any, names: Collection[str] = TRAINING_SETTINGS) -> Any:
    """A description without the settings of these names, at any depth."""
    if not isinstance(described, dict):
        return described
    return {name: without(value, names) for name, value in described.items() if name not in names}


def write_run(
    run_dir: str | Path,
    params: Params,
    *,
    model: DualEncoder,
    query: Side,
    doc: Side,
    origin: Sequence[str] = (),
    unused: Mapping[str, Array] | None = None,
) -> None:
    """Writes parameters from elsewhere as step 0 of a new run, for evaluation, search and `Initialization.init_from`.

    The folder appears once it is complete; InputError: it exists already. `origin` are the folders or names of the hub that the
    parameters are from, the other arguments as of `describe_run` and `Run`.
    """
    with atomic_dir(run_dir) as temporary:
        describe_run(temporary, model=model, query=query, doc=doc)
        keep_unused(temporary, unused or {})
        if origin:
            write_json(temporary / ORIGIN_FILE, {"from": list(origin)})
        with contextlib.closing(Checkpoints(temporary / CHECKPOINTS_DIR, keep=1)) as checkpoints:
            checkpoints.save(0, TrainState(np.zeros((), np.int32), params, {}, np.zeros((), np.int32)))


def keep_unused(run_dir: Path, unused: Mapping[str, Array]) -> None:
    """Writes the `Run.unused` of a run, unless they are there."""
    if unused and not (run_dir / UNUSED_FILE).exists() and distributed.is_first():
        import safetensors.numpy

        with atomic_file(run_dir / UNUSED_FILE) as temporary:
            safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in unused.items()}, temporary)
            temporary.chmod(run_dir.stat().st_mode & 0o666)  # the package writes for this user alone


def _kept_unused(run_dir: Path) -> dict[str, Array]:
    import safetensors.numpy

    if not (run_dir / UNUSED_FILE).is_file():
        return {}
    try:
        return dict[str, Array](safetensors.numpy.load_file(run_dir / UNUSED_FILE))
    except safetensors.SafetensorError as error:
        raise InputError(f"{run_dir / UNUSED_FILE} is damaged ({error}); remove it, as no embedding depends on it.") from None


def load_run(run_dir: str | Path, step: int | str | None = None, *, dtype: str | None = None, only_sizes: bool = False) -> Run:
    """A run's model with the parameters of one checkpoint, on the first device; adapters are merged into their kernels.

    Args:
        run_dir: a folder that `de-jax train` or `de-jax import model` made.
        step: a step that has a checkpoint, "best" for the best by the dev score, None for the newest.
        dtype: of matrix products, see `DualEncoder.with_dtype`; None for the run's own.
        only_sizes: `params` are shapes, and the checkpoint is not read.

    Raises:
        InputError: no run there, no such checkpoint, or a damaged one; names the steps there are.
    """
    run_dir = Path(run_dir)
    if not RUN.is_in(run_dir) and any((run_dir / name).is_file() for name in ("config.json", "modules.json")):
        raise InputError(
            f"{run_dir} is another library's model; make a run of it with de-jax import model --run_dir=<run> --from={run_dir}."
        )
    description, model = described(RUN, run_dir, DualEncoder.from_json)
    params = on_first_device(model.shapes())
    if only_sizes:
        found = find_checkpoint(run_dir, step)[1]
    else:
        found, params = _restored(run_dir, step, params, description)
    tokenizers = {name: kept_tokenizer(run_dir, fingerprint) for name, fingerprint in description["tokenizers"].items()}
    query = Side(tokenizers["query"], description["max_query_length"])
    doc = Side(tokenizers["doc"], description["max_doc_length"], description["max_passages"])
    return Run(run_dir, found, model.with_dtype(dtype), params, query, doc, unused=_kept_unused(run_dir))


def load_params(run_dir: str | Path, like: Params) -> Params:
    """The newest parameters of a run, each placed as its counterpart in `like`; InputError where one has another shape."""
    description, _ = described(RUN, Path(run_dir), DualEncoder.from_json)
    return _restored(Path(run_dir), None, like, description)[1]


def load_adapters(run_dir: str | Path, step: int | str | None = None) -> tuple[Lora, Params] | None:
    """The adapters of a run and their settings, as `load_run` would merge them; None for a run without adapters.

    Beside them are the parameters that `Lora.trained` names.
    """
    description, model = described(RUN, Path(run_dir), DualEncoder.from_json)
    if description["adapters"] is None:
        return None
    adapters = Lora(**description["adapters"])
    trained, _ = _parts(adapters, on_first_device(model.shapes()))
    return adapters, restore_params(Path(run_dir), step, trained)[1]


def _restored(run_dir: Path, step: int | str | None, like: Params, description: dict[str, Any]) -> tuple[int, Params]:
    """As `restore_params`, of a run with this description; adapters are merged into their kernels."""
    if description["adapters"] is None:
        return restore_params(run_dir, step, like)
    adapters = Lora(**description["adapters"])
    trained, of_base = _parts(adapters, like)
    found, params = restore_params(run_dir, step, trained)
    whole = adapters.merged(paths.tree_of({**paths.by_path(read_base(run_dir, of_base)), **paths.by_path(params)}))
    return found, jax.tree.map(lambda array, leaf: array.astype(leaf.dtype), whole, like)


def _parts(adapters: Lora, like: Params) -> tuple[Params, Params]:
    """The shapes of an adapter run's checkpoint and base, from the model's; adapters are on every device."""
    shardings = {path: leaf.sharding for path, leaf in paths.by_path(like).items()}
    first = next(iter(shardings.values()))
    everywhere = sharding.replicated(mesh) if (mesh := sharding.mesh_of(like)) else first
    parts = jax.eval_shape(lambda params: adapters.split(adapters.added_to(params, jax.random.key(0))), like)

    def placed(path: str, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings.get(path, everywhere))

    trained, of_base = (paths.map_with_path(placed, part) for part in parts)
    return trained, of_base


def on_first_device(shapes: Params) -> Params:
    """The shapes, placed on the process's first device."""
    on = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on), shapes)


def restore_params(run_dir: Path, step: int | str | None, like: Params) -> tuple[int, Params]:
    """The step and the parameters of a checkpoint, chosen as in `load_run`, each placed as its counterpart in `like`.

    A trainer that keeps few checkpoints may remove this one while it is read; then its successor is taken, if no step was named.
    """
    folder, found = find_checkpoint(run_dir, step)
    while True:
        try:
            with contextlib.closing(Checkpoints(folder)) as checkpoints:
                return found, checkpoints.restore_params(found, like)
        except InputError:
            failed = found
            if complete_steps(folder)[-1:] != [failed]:
                time.sleep(_REMOVAL_SECONDS)  # a checkpoint stays listed until its removal ends
            folder, found = find_checkpoint(run_dir, step)
            if found == failed:
                raise


def find_checkpoint(run_dir: Path, step: int | str | None) -> tuple[Path, int]:
    """The folder and the step of a checkpoint, chosen as in `load_run`."""
    if str(step).isdecimal() and (copies := addresses.wing(run_dir)):
        copies.pull(run_dir, asked=f"{CHECKPOINTS_DIR}/{step}")
    steps = {name: complete_steps(run_dir / name) for name in (MINING_DIR, CHECKPOINTS_DIR, BEST_DIR)}  # none removes the first
    if step == BEST_DIR:
        candidates = [(str(step), found) for found in complete_steps(run_dir / str(step))[-1:]]
    elif step is None:
        candidates = [(CHECKPOINTS_DIR, found) for found in steps[CHECKPOINTS_DIR][-1:]]
    else:
        candidates = [(name, found) for name in steps for found in steps[name] if str(found) == str(step)]
    if not candidates:
        there = ", ".join(map(str, sorted({*steps[CHECKPOINTS_DIR], *steps[BEST_DIR]}))) or "none"
        wanted = "a checkpoint" if step is None else f"checkpoint {step!r}"
        raise InputError(f"{run_dir} does not have {wanted}; complete checkpoints there: {there}.")
    name, found = candidates[0]
    return run_dir / name, found


def complete_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(child.name) for child in folder.iterdir() if child.name.isdigit())


def keep_tokenizer(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Writes a tokenizer into a run, if it is missing."""
    folder = tokenizer_dir(run_dir, tokenizer.fingerprint)
    if not folder.exists():
        with atomic_dir(folder) as temporary:
            tokenizer.save(temporary)


def kept_tokenizer(run_dir: Path, fingerprint: str) -> Tokenizer:
    """The tokenizer of a run with this fingerprint. InputError: it is absent, or other files stand there than were written."""
    folder = tokenizer_dir(run_dir, fingerprint)
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise InputError(f"{folder} is damaged: it is not the tokenizer that the run was trained with; {RUN.mend}.")
    return tokenizer


@contextlib.contextmanager
def continuing(run_dir: Path) -> Iterator[None]:
    """Within, `continued_tokenizer` and `continued_run` tell of a run that has a checkpoint."""
    has_steps = any(complete_steps(run_dir / name) for name in (CHECKPOINTS_DIR, BEST_DIR))
    token = _CONTINUED.set(run_dir if has_steps and RUN.is_in(run_dir) else None)
    try:
        yield
    finally:
        _CONTINUED.reset(token)


def continued_tokenizer(tower: str) -> Tokenizer | None:
    """The tokenizer that the run which is being continued has for a tower, "query" or "doc"; None for no such run."""
    run_dir, description = _CONTINUED.get(), continued_run()
    return kept_tokenizer(run_dir, description["tokenizers"][tower]) if run_dir and description else None


def continued_run() -> dict[str, Any] | None:
    """The description of the run which is being continued; None for no such run."""
    run_dir = _CONTINUED.get()
    return described(RUN, run_dir, DualEncoder.from_json)[0] if run_dir else None


def tokenizer_dir(run_dir: Path, fingerprint: str) -> Path:
    """Where a run keeps the tokenizer with this fingerprint."""
    return run_dir / "tokenizers" / fingerprint[:16]


def model_hash(described: str, params: Params) -> str:
    """Hex SHA-256 of a model's shape, as `described`, and of its parameters: equal exactly when it computes the same."""
    digest = hashlib.sha256(described.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()
