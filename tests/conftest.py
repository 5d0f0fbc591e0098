"""Eight simulated devices for every test, and shapes checked as they are annotated; a disk to fill up."""

import contextlib
import ctypes
import gc
import importlib.util
import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import jax
import often
import pytest
import timing
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook
from real_data import SHARED_DATA

# TensorFlow has no wheels for Python 3.14: all but the tests of seqio's tasks run there.
collect_ignore = [] if importlib.util.find_spec("seqio") else ["data/test_seqio_batches.py", "test_fuzzing.py"]

jax.config.update("jax_numpy_rank_promotion", "raise")
WITH_SHAPES = (
    *("types", "losses", "models", "retrieval", "evaluation", "mining", "training.step"),
    *("data.batches", "data.expansion", "data.negatives"),
)
"""The packages whose annotations have shapes; mypy sees to the others."""
install_import_hook([f"de_jax.{name}" for name in WITH_SHAPES], "beartype.beartype").__enter__()

M_ARENA_MAX = -8  # of glibc's malloc.h
MANY_OBJECTS = 50_000
"""New ones before garbage is looked for: tracing makes many that stay. Python's 700 cost a twentieth of the tests' time."""
QUICK_TO_COMPILE = "--xla_cpu_parallel_codegen_split_count=1"
"""XLA flags without a setting in JAX; read when the first program is compiled."""
if jax.__version_info__ < (0, 11):  # later versions end the process at this flag
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config):
    """Tests trace and compile much and compute little: nothing is optimized, programs hold no tracebacks, here and in processes."""
    config.pluginmanager.register(timing)
    if config.option.markexpr == "gpu":  # the device and the programs that users have are under test; see gpu/conftest.py
        return
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # what threads free is whole again, so that it can be returned
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}"
    gc.set_threshold(MANY_OBJECTS)
    share_context()
    # The second worker compiles other modules to bytecode first than the other, which begins with tests; the soak comes later.
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and config.option.markexpr != "soak":
        with contextlib.suppress(ImportError):
            import sentence_transformers  # noqa: F401
    share_settings({"jax_disable_most_optimizations": True, "jax_traceback_in_locations_limit": 0})


def share_context():
    """Each thread keeps its MLIR context. JAX makes one for each program, in 3 ms of the 4 that it takes to lower a small one."""
    with contextlib.suppress(ImportError, AttributeError):  # another JAX
        from jax._src.interpreters import mlir

        make = mlir.make_ir_context

        def kept():
            if not hasattr(_contexts, "own"):
                _contexts.own = make()
            return _contexts.own

        mlir.make_ir_context = kept


_contexts = threading.local()


def share_settings(settings):
    """Sets JAX here and, through the environment, in the processes that tests start."""
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


@pytest.fixture
def as_users_have_it():
    """The types of arguments are not checked by jaxtyping, which only tests load."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session", autouse=True)
def freed_memory_is_returned():
    """Commands keep it for the process that they have to themselves (`freed_memory.keep`); a worker runs many."""
    from de_jax import freed_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freed_memory, "keep", lambda: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before `-m` and `-k` choose."""
    for item in items:
        if item.nodeid.startswith(often.ONLY_IN_CI) and not item.get_closest_marker("soak"):
            item.add_marker("soak")
            item.add_marker("short_soak")


def pytest_collection_finish():
    """What imports made stays: looking through a million such objects takes each collection of garbage most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Each program is compiled once, whichever worker or process it runs in; as commands do it (`command.keep_compiled`)."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the session's
    share_settings({"jax_compilation_cache_dir": str(folder / "xla"), "jax_persistent_cache_min_compile_time_secs": 0.0})


@pytest.fixture(autouse=True)
def bounded_memory():
    """Drops compiled programs after a test once a worker holds 1 GiB, 300 MiB of it since it last did: it would grow to several."""
    yield
    if resident_bytes() > max(1 << 30, _held["after_dropping"] + (300 << 20)):
        jax.clear_caches()
        vars(_contexts).clear()  # constants of all programs
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        _held["after_dropping"] = resident_bytes()


_held = {"after_dropping": 0}


def resident_bytes():
    """The memory that this process holds now; where the system does not tell, the most it ever held."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class SmallDisk:
    """A folder in which space can run out: a file system of its own or, where none can be mounted, a limit on file sizes."""

    def __init__(self, folder, is_mounted):
        self.folder, self._is_mounted, self._filler = folder, is_mounted, folder / ".filler"
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(self, num_bytes):
        """Lets no more than so many bytes be written: in all, or to one file."""
        self.free()
        if self._is_mounted:
            self._filler.write_bytes(bytes(max(shutil.disk_usage(self.folder).free - num_bytes, 0)))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self._limits[1]))

    def free(self):
        self._filler.unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def files(self):
        """What is there, as {relative path: bytes}; the filler is not."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and path != self._filler]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True, check=False)
    disk = SmallDisk(folder, mount.returncode == 0)
    yield disk
    disk.free()
    if mount.returncode == 0:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def shared_data():
    """The real data of a development machine."""
    return SHARED_DATA


@pytest.fixture(scope="session")
def spiece(tmp_path_factory):
    """A folder with a small sentencepiece vocabulary."""
    from de_jax.data.text import vocabulary_training

    folder = tmp_path_factory.mktemp("spiece")
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "boxed", "vex")
    texts = [f"{first} {second} {third}" for first in words for second in words for third in words[:3]]
    vocabulary_training.train_sentencepiece(texts, folder / "spiece.model", vocab_size=36)
    return folder


@pytest.fixture(scope="session")
def tokenizer(spiece):
    from de_jax.data.text import tokenizing

    return tokenizing.load_tokenizer(spiece)
