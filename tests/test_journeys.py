"""How many files of the package a call enters: a way that grows longer has to say so here.

The walk is counted by `sys.settrace`, in a process of its own so that nothing else is entered, and for the second time so that
caches are full and imports are done.
"""

import json
import subprocess
import sys

import pretrained_folders
import pytest

WORDS = ("apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder")
MOST_FILES = {"batch": 10, "train": 40, "load": 20}
"""From a csv, tokenized before, to a batch; to the end of a training of two updates; from a folder of a model to an embedding."""
ON_THE_WAY = {"batch": "data/batches/pair_batches.py", "train": "training/step/train_step.py", "load": "interop/any_model.py"}

WALK = """
import json, os, sys, tempfile, threading
from functools import partial

import de_jax
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.sources.pair_store import table_pairs
from de_jax.losses import in_batch_softmax
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Optimization
from de_jax.training.optim.optimizer import adamw

journey, csv, tokenizer, model = sys.argv[1:]
options = PairsOptions(tokenizer=tokenizer, batch_size=8, max_query_length=16, max_doc_length=32, cache_dir=tempfile.mkdtemp())
data = partial(table_pairs, csv, options=options)


def batch():
    next(data(share=Share()).batches(0))


def train():
    encoder = T5Config(vocab_size=96, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32, dropout_rate=0.0)
    tower = TowerConfig(encoder, projection_dim=8)
    recipe = de_jax.Recipe(
        model=DualEncoder(query=tower, doc=tower),
        data=data,
        loss=partial(in_batch_softmax, temperature=0.05),
        optimization=Optimization(optimizer=adamw, num_steps=2),
    )
    de_jax.train(recipe, tempfile.mkdtemp())


def load():
    de_jax.load(model).encode_query(["how do I open a file?"])


root, files = os.path.dirname(de_jax.__file__) + os.sep, set()


def see(frame, *_):  # asked of each call alone, as it returns no function for the lines
    code = frame.f_code
    if code.co_filename.startswith(root) and code.co_name != "<module>":
        files.add(code.co_filename.removeprefix(root))


walk = {"batch": batch, "train": train, "load": load}[journey]
walk()
threading.settrace(see)
sys.settrace(see)
walk()
sys.settrace(None)
threading.settrace(None)
print(json.dumps(sorted(files)))
"""


@pytest.mark.parametrize("journey", MOST_FILES)
def test_a_journey_enters_no_more_files_than_it_did(journey, spiece, tmp_path):
    rows = [f"{first} {second},the {first} and the {second} falls\n" for first in WORDS for second in WORDS]
    (tmp_path / "qa.csv").write_text("question,answer\n" + "".join(rows))
    if journey == "load":
        pretrained_folders.write_sentence_transformer(tmp_path / "model", "bert")
    command = [sys.executable, "-c", WALK, journey, str(tmp_path / "qa.csv"), str(spiece), str(tmp_path / "model")]
    walked = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    files = json.loads(walked.stdout.splitlines()[-1])
    assert ON_THE_WAY[journey] in files
    assert len(files) <= MOST_FILES[journey], "\n".join(files)
