"""The embedded data set: docstrings of the standard library and of the packages de_jax stands on, as a retrieval task.

A query is the first sentence of a docstring; its document is the signature and the rest, from which that sentence was taken out.
Sources are parsed, never imported. The set depends on the installed versions alone, which `versions.json` records.

    Training     has more queries for a document: the words of its name, and sentences of the rest (`training_queries`).
    Splits       by module (`split_of`): all functions of a module are in one split, so nothing leaks from train to dev or test.
    Duplicates   of docstrings with the same first sentence, or that share more than 60 % of their three-word sequences,
                 only the one whose id sorts first is kept.
    Corpus       the documents of all three splits are candidates for every query.
"""

import concurrent.futures
import contextlib
import gc
import hashlib
import importlib.metadata
import multiprocessing
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from de_jax.data.text import beir, docstrings, near_duplicates
from de_jax.data.text.docstrings import Docstring
from de_jax.files import folders
from de_jax.files.outputs import progress_bar
from de_jax.settings import Count, Record, map_of
from de_jax.types import InputError

PYDOCS = folders.Kind(
    "pydocs", Record({"counts": map_of(Count)}), make="build it with de-jax import pydocs", file="versions.json", version=2
)
SPLITS = ("train", "dev", "test")
MAX_RESEMBLANCE = 0.6

DISTRIBUTIONS = (
    # The requirements of de_jax and their own requirements: about the same on every machine.
    "absl-py", "aiofiles", "bm25s", "contourpy", "cycler", "etils", "filelock", "flax", "fonttools", "fsspec", "gin-config",
    "huggingface_hub", "humanize", "importlib_resources", "ir_measures", "jax", "jaxlib", "jaxtyping", "joblib", "kiwisolver",
    "markdown-it-py", "matplotlib", "ml_dtypes", "msgpack", "narwhals", "numpy", "opt_einsum", "optax", "orbax-checkpoint",
    "packaging", "pillow", "protobuf", "psutil", "Pygments", "pyparsing", "python-dateutil", "pytrec_eval-terrier", "PyYAML",
    "rich", "safetensors", "scikit-learn", "scipy", "sentencepiece", "simplejson", "tensorboardX", "tensorstore",
    "threadpoolctl", "tokenizers", "tqdm", "treescope", "typing_extensions", "wadler_lindig", "zipp",
)  # fmt: skip

# Of the first six hundred, the one by which dev and test of the standard library are nearest to a tenth, and no package in them is
# larger than an eighth.
_SPLIT_SALT = 85
_MAX_SENTENCES = 3
_MIN_SENTENCE_WORDS = 4

_WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # "rawDecode_JSON2": raw, Decode, JSON, 2
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "_vendor", "site-packages", "dist-packages", "turtledemo"}
_NAMESPACES = {"google", "mpl_toolkits", "orbax"}


def build(
    out_dir: str | Path,
    *,
    max_docs: int | None = None,
    packages: bool = True,
    num_processes: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Writes the data set in the BEIR layout and returns the contents of `versions.json`, with its counts.

    Equal versions give equal bytes, whatever the number of processes. A whole set of these versions and options stays as it is.

    Args:
        out_dir: gets corpus.jsonl.gz, queries.jsonl, qrels/{train,dev,test}.tsv and versions.json.
        max_docs: at most so many documents: those of the first modules by a hash of their names, the others are not read.
        packages: also read the installed packages; False gives the standard library alone, the same set wherever that Python is.
    """
    out_dir = Path(out_dir)
    installed = _installed() if packages else {}
    wanted = {"python": platform.python_version(), "packages": installed, "max_docs": max_docs}
    if PYDOCS.is_in(out_dir):
        with contextlib.suppress(InputError):  # a damaged set is built again
            versions = PYDOCS.open(out_dir, is_thorough=True)
            if all(versions.get(key) == value for key, value in wanted.items()):
                return versions
    folders.require_replaceable(out_dir, PYDOCS.name)
    docs = _read(_sources(installed), max_docs, num_processes, progress)
    if not docs:
        raise InputError("no docstring was found: the sources of the standard library and of the packages are not installed.")
    queries: dict[str, str] = {}
    qrels: dict[str, beir.Qrels] = {split: {} for split in SPLITS}
    for doc in docs:
        split = split_of(doc.doc_id)
        asked = training_queries(doc) if split == "train" else {f"q:{doc.doc_id}": doc.summary}
        queries |= asked
        qrels[split] |= {query_id: {doc.doc_id: 1} for query_id in asked}
    counts = {"docs": len(docs), **{f"{split}_queries": len(judged) for split, judged in qrels.items()}}
    with PYDOCS.writing(out_dir) as folder:
        beir.write(folder, ((doc.doc_id, doc.signature, doc.rest) for doc in docs), queries.items(), qrels)
        return PYDOCS.write_manifest(folder, {**wanted, "counts": counts})


def _read(sources: list[tuple[str, Path]], max_docs: int | None, num_processes: int | None, progress: bool) -> list[Docstring]:
    """The documents of the set; where few are wanted, modules are read in portions until there are enough."""
    if max_docs is None:
        return select(_parse(sources, num_processes, progress))
    sources = sorted(sources, key=lambda source: _fraction(source[0]))
    found: list[Docstring] = []
    docs: list[Docstring] = []
    portion = max_docs // 4 + 1  # a module has three documents on average
    for start in range(0, len(sources), portion):
        found += _parse(sources[start : start + portion], num_processes, progress)
        docs = select(found)
        if len(docs) >= max_docs:
            break
    return sorted(sorted(docs, key=lambda doc: _fraction(doc.doc_id.partition(":")[0]))[:max_docs])


def select(found: Iterable[Docstring]) -> list[Docstring]:
    """The docstrings of the set in ascending order of id: ids and first sentences unique, near-duplicates dropped."""
    unique: list[Docstring] = []
    seen: set[str] = set()
    for doc in sorted(found):
        keys = {doc.doc_id, f"{re.sub(r'[^a-z0-9]+', ' ', doc.summary.lower()).strip()} (a summary)"}
        if not keys & seen:
            unique.append(doc)
            seen |= keys
    hashed = (near_duplicates.shingles(f"{doc.summary} {doc.rest}") for doc in unique)
    return [unique[position] for position in near_duplicates.keep(hashed, max_resemblance=MAX_RESEMBLANCE)]


def training_queries(doc: Docstring) -> dict[str, str]:
    """The queries of a docstring in training, by their ids: its first sentence, the words of its name, and sentences of the rest.

    The sentences are in the document too, so they teach what words have in common; Lee et al. (2019) take most of them out
    (inverse cloze task).
    """
    module, _, name = doc.doc_id.partition(":")
    words = _WORD_OF_NAME.findall(f"{module.rpartition('.')[2]}.{name}")
    queries = {"q": doc.summary, "name": " ".join(dict.fromkeys(word.lower() for word in words))}
    sentences = [one for one in docstrings.sentences(doc.rest) if one.count(" ") >= _MIN_SENTENCE_WORDS - 1]
    queries |= {f"s{number}": sentence for number, sentence in enumerate(sentences[:_MAX_SENTENCES], start=1)}
    return {f"{kind}:{doc.doc_id}": query for kind, query in queries.items() if query}


def split_of(doc_id: str) -> str:
    """The split of a docstring: a tenth of the modules is "test", a tenth "dev", the rest "train"."""
    fraction = _fraction(f"{_SPLIT_SALT} {module_group(doc_id)}")
    return "test" if fraction < 0.1 else "dev" if fraction < 0.2 else "train"


def module_group(doc_id: str) -> str:
    """The module whose docstrings stay together: a file or sub-package of a package, one level deeper below a private one.

    >>> module_group("scipy.signal._filter_design:butter"), module_group("jax._src.numpy.lax_numpy:where")
    ('scipy.signal', 'jax._src.numpy')
    """
    parts = doc_id.split(":")[0].split(".")
    depth = 3 if parts[0] in _NAMESPACES else 2
    while depth < len(parts) and parts[depth - 1].startswith("_"):
        depth += 1
    return ".".join(parts[:depth])


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def _installed() -> dict[str, str]:
    """The version of each distribution of the list that is there."""
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _sources(distributions: Iterable[str]) -> list[tuple[str, Path]]:
    """(module, file) of every Python source of the standard library and of these distributions, in ascending order of module."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = [(file.relative_to(stdlib).parts, file) for file in stdlib.rglob("*.py")]
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if file.suffix == ".py":
                found.append((file.parts, Path(str(distribution.locate_file(file)))))
    modules: dict[str, Path] = {}
    for parts, path in sorted(found):
        names = [*parts[:-1], parts[-1].removesuffix(".py")]
        if not _SKIPPED_FOLDERS.intersection(parts[:-1]) and all(name.isidentifier() for name in names):
            module = ".".join(names[:-1] if names[-1] == "__init__" and len(names) > 1 else names)
            modules.setdefault(module, path)
    return sorted(modules.items())


def _parse(sources: list[tuple[str, Path]], num_processes: int | None, progress: bool) -> Iterator[Docstring]:
    if not sources:
        return
    num_processes = num_processes or min(os.cpu_count() or 1, 8)
    modules, paths = zip(*sources, strict=True)
    with contextlib.ExitStack() as stack:
        if num_processes == 1:
            results: Iterator[list[Docstring]] = map(docstrings.read_file, paths, modules)
        else:
            # Spawned, as a forked copy of a process that runs JAX's threads can hang.
            context = multiprocessing.get_context("spawn")
            # A syntax tree has no cycles; the collector would only walk its many nodes, a quarter of the time.
            pool = concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context, initializer=gc.disable)
            stack.enter_context(pool)
            results = pool.map(docstrings.read_file, paths, modules, chunksize=32)
        for docs in progress_bar(results, total=len(sources), desc="read docstrings", unit=" files", disable=not progress):
            yield from docs
