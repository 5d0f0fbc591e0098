"""Runs the installed wheel as a user does, in the folder where it is started: every verb's help, quickstart, search, every export.

Started by tests/wheel.sh with the Python of an environment that holds the wheel alone. Prints a line with its seconds for each
step; the first step that fails ends it with a traceback and a non-zero exit.
"""

import contextlib
import importlib.metadata
import io
import json
import platform
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import de_jax
from de_jax import cli

FORMATS = ("sentence_transformers", "safetensors", "serving")  # the quickstart's tower has no layers, which T5X cannot store
QUICKSTART = ("--run_dir=runs/quickstart", "--max_docs=1000", "--num_steps=4")
RUN = "--run_dir=runs/quickstart"
PLAN = ("--gin_file=recipes/sde.gin", "--gin_file=models/t5_1_1_tiny.gin", "--gin.T5Config.num_layers=1")
SHAPE = ("--topology=cpu:4", "--batch_size=8", "--query_length=8", "--doc_length=8")


def main() -> None:
    """Every step in turn."""
    package = Path(cli.__file__).resolve()
    if not package.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()):
        sys.exit(f"de_jax comes from {package.parent}, which is not the installed wheel.")
    names = ("de-jax-retrieval", "jax", "jaxlib", "flax", "numpy")
    print(f"Python {platform.python_version()},", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    with step("de-jax --help"):
        script = Path(sysconfig.get_path("scripts")) / "de-jax"
        usage = process(str(script), "--help")
        assert [verb for verb in cli.VERBS if f"  {verb} " not in usage] == []
    with step(f"--help of {len(cli.VERBS)} verbs"):
        for verb in cli.VERBS:
            shows_an_example(verb)
    with step("quickstart"):
        assert json.loads(run("quickstart", *QUICKSTART))["steps"] == 4
    with step("search"):
        found = json.loads(run("search", RUN, "--dataset_dir=runs/quickstart/pydocs", "--query=open a file that is compressed"))
        assert len(found["results"]) == 10
    with step("de_jax.load"):
        model = de_jax.load("runs/quickstart")
        index = model.index(model.encode_document(["opens a file", "counts the values", "removes a folder"]), precision="int8")
        assert index.search(model.encode_query("open a file that is compressed"), k=2)[0].rank == 1
    for format in FORMATS:
        with step(f"export model --format={format}"):
            assert json.loads(run("export", "model", RUN, f"--format={format}", f"--out_dir=exported/{format}"))["files"] > 0
    with step("python -m de_jax plan"):
        assert json.loads(process(sys.executable, "-m", "de_jax", "plan", *PLAN, *SHAPE))["executed_flops"] > 0


@contextlib.contextmanager
def step(name):
    """Prints how long a step took, or its name before its error."""
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print(f"FAILED  {name}", flush=True)
        raise
    print(f"{time.monotonic() - start:6.1f} s  {name}", flush=True)


def run(*arguments: str) -> str:
    """What `de-jax` prints, run in this process: JAX is imported once, and what verbs compile alike is compiled once."""
    sys.argv = ["de-jax", *arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                raise
    return out.getvalue()


def process(*command: str) -> str:
    """What a process of its own prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def shows_an_example(verb: str) -> None:
    """The help of a verb names commands that an installation has."""
    text = run(*verb.split(), "--help")
    assert re.search(rf"^ *(\w+=\w+ )?de-jax {verb}( +\S|$)", text, re.MULTILINE), text
    assert "python -m" not in text, text


if __name__ == "__main__":
    main()
