"""The way from a folder to an embedding stays short: files of the library that are entered, and modules that are loaded."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pretrained_folders import write_sentence_transformer

import de_jax

MOST_FILES = 24
"""20 were the aim; more merging would put the packing of tokens, which training shares, or the towers into one file with this."""
MOST_MODULES = 90
ROOT = str(Path(de_jax.__file__).parent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("journey") / "model"
    write_sentence_transformer(path, "bert")
    return path


def test_few_files_are_entered(folder):
    def walk():
        de_jax.load(folder).encode_query(["how do I open a file?"])

    entered = set()

    def see(frame, *_):  # asked of each call alone, as it returns no function for the lines
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            entered.add(code.co_filename)

    walk()
    threading.settrace(see)
    sys.settrace(see)
    try:
        walk()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    assert len(entered) <= MOST_FILES, sorted(entered)


def test_few_modules_are_loaded(folder):
    walk = "import sys, de_jax; de_jax.load(sys.argv[1]).encode_query(['a']); print(*(m for m in sys.modules if 'de_jax' in m))"
    printed = subprocess.run([sys.executable, "-c", walk, str(folder)], capture_output=True, text=True, check=True).stdout
    assert len(printed.split()) <= MOST_MODULES
