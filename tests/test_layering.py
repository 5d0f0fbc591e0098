"""Who may import whom: the table of the house, held against every module's syntax tree and against what is really loaded.

Where this test stops you, either the import belongs elsewhere or the table wants a new entry; decide which before you edit it.
"""

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {
    *("tensorflow", "seqio", "faiss", "torch", "transformers", "sentence_transformers", "matplotlib", "sklearn", "ir_measures"),
    *("bm25s", "Stemmer", "nltk", "rapidfuzz", "sentencepiece", "tokenizers", "tensorboardX"),
    *("wandb", "mteb", "datasets", "pyarrow", "pymilvus", "huggingface_hub", "gradio", "fsspec"),
    *("onnx", "onnxruntime", "openvino", "starlette", "uvicorn"),
}


class Rule(NamedTuple):
    """What a module may import beside the standard library and its own layer."""

    layers: tuple[str, ...] = ()  # modules and sub-packages of de_jax
    packages: tuple[str, ...] = ()  # third-party packages, anywhere in the file
    lazy: tuple[str, ...] = ()  # third-party packages, inside functions only

    def allowing(self, *lazy: str) -> "Rule":
        return self._replace(lazy=self.lazy + lazy)


FILES = Rule(("types",), ("numpy", "jaxtyping"))
DATA = Rule(("types", "settings", "files", "data"), ("numpy", "jaxtyping"))
TRAINING = Rule((*DATA.layers, "losses", "models"), ("jax", "numpy", "jaxtyping", "optax", "orbax"), ("tensorboardX",))
ABOVE_TRAINING = Rule((*DATA.layers, "losses", "models", "training"), ("jax", "numpy", "jaxtyping"), ("scipy", "safetensors"))
CONCERN = ABOVE_TRAINING._replace(layers=(*ABOVE_TRAINING.layers, "retrieval", "mining"))
PROCESS = Rule(
    (*CONCERN.layers, "command", "interop", "doc2query", "evaluation", "recipe", "recipe_checks"),
    ("jax", "numpy", "jaxtyping"),
)
RULES = {  # of "de_jax": when they are used, see below
    "de_jax": Rule(
        ("documents", "lightening", "losses", "model", "models", "optim", "recipe", "scoring", "trainer", "trials", "tuning")
    ),
    "de_jax.types": Rule(),
    "de_jax.settings": Rule(("types", "files"), ("numpy",)),
    "de_jax.files": FILES,
    "de_jax.files.outputs": FILES.allowing("tqdm"),
    "de_jax.buckets": Rule(("types", "settings", "files"), (), ("fsspec",)),
    "de_jax.freed_memory": Rule(()),
    "de_jax.engine": Rule(("types", "settings", "files", "command"), (), ("ray",)),
    "de_jax.command": Rule(("types", "settings", "files", "freed_memory")),
    "de_jax.cli": Rule(("types", "settings", "command", "flags", "arguments")),
    "de_jax.flags": Rule(("types", "settings", "command")),
    "de_jax.__main__": Rule(("cli",)),
    "de_jax.losses": Rule(("types", "settings"), ("jax", "jaxtyping")),
    "de_jax.models": Rule(("types", "settings"), ("jax", "numpy", "jaxtyping", "flax")),
    "de_jax.data": DATA,
    "de_jax.data.text.tokenizing": DATA.allowing("sentencepiece", "tokenizers"),
    "de_jax.data.text.vocabulary_training": DATA.allowing("sentencepiece", "tokenizers"),
    "de_jax.data.text.table_files": DATA.allowing("pyarrow", "datasets", "flatbuffers"),
    "de_jax.data.expansion.relevance": DATA.allowing("nltk", "rapidfuzz"),
    "de_jax.data.sources.seqio_tasks": DATA.allowing("tensorflow", "seqio"),
    "de_jax.tasks": Rule(("types", "settings", "data", "files"), ("numpy", "seqio", "tensorflow")),
    "de_jax.training": TRAINING,
    "de_jax.optim": Rule(("training",)),
    "de_jax.training.run.run_folder": TRAINING.allowing("safetensors"),
    "de_jax.training.run.wandb_log": TRAINING.allowing("wandb"),
    "de_jax.training.mesh.plan": TRAINING.allowing("libtpu"),
    "de_jax.training.step.train_step": TRAINING._replace(layers=("types",)),
    "de_jax.models.onnx_graph": Rule(("types", "settings"), ("jax", "numpy", "jaxtyping", "flax"), ("onnx",)),
    "de_jax.retrieval": ABOVE_TRAINING,
    "de_jax.retrieval.sessions": ABOVE_TRAINING.allowing("onnx", "onnxruntime", "openvino"),
    "de_jax.retrieval.bm25": ABOVE_TRAINING.allowing("bm25s", "Stemmer"),
    "de_jax.retrieval.faiss_filling": ABOVE_TRAINING.allowing("faiss"),
    "de_jax.retrieval.milvus_index": ABOVE_TRAINING.allowing("pymilvus"),
    "de_jax.mining": CONCERN,
    "de_jax.mining.imported": DATA,
    "de_jax.mining.teacher": CONCERN.allowing("sentence_transformers", "torch"),
    "de_jax.doc2query": CONCERN,
    "de_jax.evaluation": CONCERN,
    "de_jax.evaluation.metrics": CONCERN.allowing("ir_measures"),
    "de_jax.reports": CONCERN._replace(layers=(*CONCERN.layers, "evaluation")),
    "de_jax.reports.model_card": CONCERN._replace(layers=(*CONCERN.layers, "evaluation", "interop")).allowing("huggingface_hub"),
    "de_jax.reports.plots": CONCERN.allowing("matplotlib", "PIL", "sklearn", "threadpoolctl"),
    "de_jax.arguments": PROCESS._replace(layers=(*PROCESS.layers, "flags", "engine", "configurables", "gin_settings")),
    "de_jax.interop": ABOVE_TRAINING._replace(layers=(*ABOVE_TRAINING.layers, "doc2query")).allowing(
        "huggingface_hub", "torch", "transformers", "tokenizers"
    ),
    "de_jax.interop.export": ABOVE_TRAINING._replace(layers=(*ABOVE_TRAINING.layers, "retrieval")),
    "de_jax.interop.served_encoder": Rule((), ("jax", "numpy"), ("sentencepiece", "tokenizers")),
    "de_jax.interop.sentence_transformers_export": ABOVE_TRAINING.allowing("sentencepiece", "tokenizers"),
    "de_jax.interop.t5x": ABOVE_TRAINING.allowing("msgpack", "tensorstore"),
    "de_jax.mteb": Rule(("types",), ("numpy", "jaxtyping"), ("mteb", "jax")),
    "de_jax.gin_settings": Rule(("types", "settings", "files"), ("gin",)),
    "de_jax.configurables": PROCESS._replace(layers=(*PROCESS.layers, "gin_settings"), packages=("gin",)),
    "de_jax.recipe": PROCESS._replace(packages=("jax",)),
    "de_jax.recipe_checks": PROCESS,
    "de_jax.model": PROCESS._replace(layers=(*PROCESS.layers, "reports")),
    "de_jax.scoring": PROCESS._replace(layers=(*PROCESS.layers, "model")),
    "de_jax.demo": PROCESS._replace(layers=(*PROCESS.layers, "model")),
    "de_jax.demo.gradio_page": PROCESS._replace(layers=(*PROCESS.layers, "model")).allowing("gradio"),
    "de_jax.documents": PROCESS._replace(layers=(*PROCESS.layers, "model")),
    "de_jax.tuning": PROCESS._replace(layers=(*PROCESS.layers, "documents", "model", "trainer")),
    "de_jax.lightening": PROCESS._replace(layers=(*PROCESS.layers, "model", "trainer", "tuning")),
    "de_jax.trials": PROCESS._replace(layers=(*PROCESS.layers, "documents", "model", "scoring", "trainer", "tuning")),
    "de_jax.server": PROCESS._replace(layers=(*PROCESS.layers, "model")).allowing("starlette", "uvicorn"),
    "de_jax.trainer": PROCESS._replace(layers=(*PROCESS.layers, "hooks")),
    "de_jax.mine": PROCESS,
    "de_jax.planner": PROCESS,
}


class Import(NamedTuple):
    name: str  # dotted
    line: int
    is_lazy: bool  # inside a function, or for the type checker only


@functools.cache
def imports_of(source: str) -> list[Import]:
    """Every import of a file; `from a import b` is a.b. A relative one keeps its dots, and so is nobody's package."""
    found = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.extend(Import(f"{base}.{alias.name}", node.lineno, is_lazy) for alias in node.names)
        is_lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy)

    visit(ast.parse(source), False)
    return found


def rule_of(module: str) -> Rule | None:
    """The rule of the module or of the nearest package above it; `de_jax` itself speaks for its __init__ alone."""
    if module == "de_jax":
        return RULES[module]
    while module != "de_jax" and module not in RULES:
        module = module.rpartition(".")[0]
    return None if module == "de_jax" else RULES[module]


def violations(module: str, source: str) -> list[str]:
    """One line for each import that the table does not allow."""
    rule = rule_of(module)
    if rule is None:
        return [f"{module}: has no rule in the table"]
    own_layer = module.split(".")[1] if "." in module else None
    found = []
    for name, line, is_lazy in imports_of(source):
        package = name.partition(".")[0]
        if package == "de_jax":
            layer = name.split(".")[1] if "." in name else ""
            allowed = layer in (own_layer, "__version__", *rule.layers)
        else:
            allowed = package in sys.stdlib_module_names or package in rule.packages or (is_lazy and package in rule.lazy)
        if not allowed:
            where = " at module level" if package in rule.lazy else ""
            found.append(f"{module}, line {line}: must not import {name}{where}")
    return found


def check_order(sources: dict[str, str]) -> None:
    """Raises `graphlib.CycleError`, with the way round, where layers import each other, whatever the table allows."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        layer = module.split(".")[1]
        imported = {name.split(".")[1] for name, _, _ in imports_of(source) if name.startswith("de_jax.")}
        graph.setdefault(layer, set()).update(imported - {layer})
    graphlib.TopologicalSorter(graph).prepare()


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; tools/ and gin_configs/ lie elsewhere and are free."""
    found = {}
    for file in sorted((ROOT / "de_jax").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def loaded_by(code: str) -> set[str]:
    """The top-level packages that running `code` in a fresh interpreter loads, the standard library's aside."""
    return loaded_by_each([code])[0]


def loaded_by_each(programs: Iterable[str]) -> list[set[str]]:
    """As `loaded_by`, after each of several programs that run one after the other in one interpreter."""
    shown = "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    lines = ["import sys, json; before = set(sys.modules)", *(f"{program}\n{shown}" for program in programs)]
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    return [set(json.loads(line)) - set(sys.stdlib_module_names) for line in run.stdout.splitlines()]


def importing(*layers: str) -> str:
    """A program that imports every module of these layers."""
    return "\n".join(f"import {name}" for name in modules() if name.split(".")[1:2] and name.split(".")[1] in layers)


def task_modules() -> dict[str, Path]:
    """tasks/ by the names it has after an installation; what imports seqio imports these, inside functions."""
    return {f"de_jax.tasks.{file.stem}".removesuffix(".__init__"): file for file in sorted((ROOT / "tasks").glob("*.py"))}


@pytest.mark.parametrize("module", modules() | task_modules())
def test_module_imports_only_what_its_layer_may(module):
    assert violations(module, (modules() | task_modules())[module].read_text(encoding="utf-8")) == []


def test_tools_import_the_package_and_not_each_other():
    """They run both as tools.x and as de_jax.tools.x, and only one of these exists after an installation."""
    for file in sorted((ROOT / "tools").glob("*.py")):
        names = [name for name, _, _ in imports_of(file.read_text(encoding="utf-8"))]
        assert [n for n in names if n.startswith(("tools.", ".", "de_jax.tools")) or n == "tools"] == [], file.name


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("de_jax.losses.in_batch", "import flax", "must not import flax"),
        ("de_jax.losses.in_batch", "import optax as o", "must not import optax"),
        ("de_jax.losses.in_batch", "from de_jax.models import t5", "must not import de_jax.models.t5"),
        ("de_jax.losses.in_batch", "from de_jax import models", "must not import de_jax.models"),
        ("de_jax.losses.in_batch", "from ..models import t5", "must not import ..models.t5"),
        ("de_jax.data.batches.pair_batches", "import jax.numpy as jnp", "must not import jax.numpy"),
        ("de_jax.data.batches.pair_batches", "def f():\n    import jax", "line 2: must not import jax"),
        ("de_jax.data.text.tokenizing", "import sentencepiece", "must not import sentencepiece at module level"),
        ("de_jax.data.sources.options", "from de_jax.mining.miner import Miner", "must not import de_jax.mining.miner.Miner"),
        ("de_jax.data.sources.mixture", "def f():\n    from de_jax import mining", "line 2: must not import de_jax.mining"),
        ("de_jax.data.negatives.generations", "from de_jax.retrieval import index", "must not import de_jax.retrieval.index"),
        ("de_jax.data.stores.corpus", "def f():\n    import sentencepiece", "must not import sentencepiece"),
        ("de_jax.files.outputs", "class A:\n    import tqdm", "must not import tqdm at module level"),
        ("de_jax.models.t5", "import optax", "must not import optax"),
        ("de_jax.training.run.fit", "import flax.linen as nn", "must not import flax.linen"),
        ("de_jax.training.run.fit", "import gin", "must not import gin"),
        ("de_jax.training.step.train_step", "from de_jax.models.t5 import T5Config", "must not import de_jax.models.t5.T5Config"),
        ("de_jax.training.run.run_folder", "from de_jax.retrieval import index", "must not import de_jax.retrieval.index"),
        ("de_jax.retrieval.index", "def f():\n    import faiss", "must not import faiss"),
        ("de_jax.trainer", "import tensorflow", "must not import tensorflow"),
        ("de_jax.evaluation.metrics", "from de_jax.tools import search", "must not import de_jax.tools.search"),
        ("de_jax", "from de_jax import types", "must not import de_jax.types"),
        ("de_jax.tasks.beir", "import jax", "must not import jax"),
        ("de_jax.data.sources.seqio_tasks", "import seqio", "must not import seqio at module level"),
        ("de_jax.plugins.new", "", "has no rule in the table"),
        ("de_jax.plugins", "", "has no rule in the table"),
    ],
)
def test_the_checker_objects(module, source, expected):
    (violation,) = violations(module, source)
    assert expected in violation


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("de_jax.losses.in_batch", "import jax.numpy as jnp\nfrom de_jax.types import Embeddings\nfrom de_jax.losses import masks"),
        ("de_jax.data.text.tokenizing", "import json\ndef f():\n    if True:\n        import sentencepiece"),
        ("de_jax.data.text.tokenizing", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tokenizers"),
        ("de_jax.training.run.fit", "from de_jax.training.step.train_step import TrainStep"),
        ("de_jax.configurables", "import gin\nfrom de_jax import gin_settings, recipe"),
    ],
)
def test_the_checker_accepts(module, source):
    assert violations(module, source) == []


def test_layers_import_in_one_direction():
    sources = {module: file.read_text(encoding="utf-8") for module, file in modules().items() if module != "de_jax"}
    check_order(sources)
    with pytest.raises(graphlib.CycleError, match=r"data.*mining|mining.*data"):
        check_order({**sources, "de_jax.data.sources.new": "def f():\n    from de_jax.mining import miner"})


def test_importing_the_package_imports_nothing_else():
    assert loaded_by("import de_jax") == {"de_jax"}


def test_the_face_of_data_loads_a_source_when_it_is_used():
    assert loaded_by("import de_jax.data") == {"de_jax"}
    names = "from de_jax.data import Curriculum, PairsOptions, beir_pairs, mixed_pairs, seqio_pairs, stored_pairs, table_pairs"
    assert not loaded_by(f"{names}; import de_jax.data as data; assert set(data._MODULES) <= set(dir(data))") & {"jax", *HEAVY}
    with pytest.raises(ImportError, match="no_such"):
        from de_jax.data import no_such  # noqa: F401


@pytest.fixture(scope="module")
def loaded():
    """The packages that are loaded after each of these, imported one after the other."""
    programs = {
        "data": importing("data"),
        "losses": importing("losses"),
        "training": "import de_jax.trainer, de_jax.mine, de_jax.planner",
        "all": importing(*{name.split(".")[1] for name in modules() if "." in name}),
    }
    return dict(zip(programs, loaded_by_each(programs.values()), strict=True))


def test_no_module_loads_a_heavy_package(loaded):
    assert loaded["all"] >= {"jax", "flax", "optax", "orbax", "gin"}
    assert not loaded["all"] & HEAVY


def test_data_runs_without_jax(loaded):
    assert "numpy" in loaded["data"]
    assert not loaded["data"] & {"jax", "jaxlib", "flax"}


def test_training_mining_and_planning_from_python_need_no_gin(loaded):
    assert "gin" not in loaded["training"]


def test_losses_load_no_model_and_no_optimizer(loaded):
    assert "jax" in loaded["losses"]
    assert not loaded["losses"] & {"flax", "optax", "orbax", "gin"}


def test_the_loading_check_objects():
    assert loaded_by("import de_jax, numpy") == {"de_jax", "numpy"}
