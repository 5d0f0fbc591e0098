"""Training, mining and encoding, killed with SIGKILL at random moments: the result is that of an undisturbed run.

Each attempt is a process of its own, started as the command is and killed as a whole; only Python's imports are shared, by a fork.
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from toy_run import ALL_DEVICES, arguments

from de_jax import cli
from de_jax.evaluation import metrics
from de_jax.models.t5 import T5Config
from de_jax.tools import doc2query
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import load_run

KILLING = Path(__file__).resolve().parents[1] / "killing.py"
RUNS_PER_KILL = 5
"""On a fast machine more runs come to their end before the kill than are killed."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(36000)]


def killed(verb, argv, watch, num_kills, rng, **more):
    """Runs the first list undisturbed and the others until they were killed often enough; how many came to their end."""
    job = {"verb": verb, "argv": argv, "watch": list(map(str, watch)), "kills": num_kills, "seed": rng.randrange(10**6)}
    job |= {name: list(map(str, values)) for name, values in more.items()}
    done = subprocess.run(
        [sys.executable, str(KILLING)],
        input=json.dumps(job),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    print(found)
    assert len(found["kills"]) == num_kills
    return found["finished"]


def state(folder):
    """All arrays of the newest checkpoint in a folder of them."""
    newest = max(int(path.name) for path in folder.iterdir())
    return newest, [
        jax.tree.map(np.asarray, ocp.PyTreeCheckpointer().restore(folder / str(newest) / part)) for part in ("params", "training")
    ]


def curve(run_dir):
    lines = run_log.read_metrics(run_dir / run_log.METRICS_FILE)
    return [{name: value for name, value in line.items() if name != "pairs_per_second"} for line in lines]


def names(run_dir):
    """What lies in a run folder, but for the insides of checkpoints and one event file for each start."""
    found = {str(path.relative_to(run_dir)) for pattern in ("*", "*/*", "tokenizers/*/*") for path in run_dir.glob(pattern)}
    return {name for name in found if not name.startswith("tensorboard/")}


ADAPTERS = {"Recipe__adapters": "@Lora()", "Lora__rank": 2, "Lora__dropout": 0.1}
EARLY = {"Logging__early_stopping_patience": 2, "Logging__evaluate_every_steps": 3, "Logging__save_every_steps": 7}


@pytest.mark.parametrize("more", [{}, ADAPTERS, EARLY], ids=["all", "adapters", "early stopping"])
def test_training_killed_again_and_again_ends_bit_equal(dataset_dir, tmp_path, num_kills, rng, more):
    run_dirs = [tmp_path / str(number) for number in range(RUNS_PER_KILL * num_kills + 2)]
    changes = {
        **ALL_DEVICES,
        "T5Config__dropout_rate": 0.1,
        "Optimization__num_steps": 160,
        "Logging__save_every_steps": 4,
        "Logging__log_every_steps": 3,
        "Logging__evaluate_every_steps": 10,
        **more,
    }
    argv = [arguments(dataset_dir, run_dir, **changes) for run_dir in run_dirs]
    finished = killed("train", argv, [run_dir / "checkpoints" / "*.orbax-checkpoint-tmp" for run_dir in run_dirs], num_kills, rng)
    whole, *others = run_dirs[:finished]
    assert others
    last = state(whole / "checkpoints")[0]
    assert [line["step"] for line in curve(whole) if "loss" in line] == sorted({*range(3, last, 3), last})
    assert (last < 160) == (more == EARLY)
    for run_dir in others:
        for folder in ("checkpoints", "best", *(["base"] if more == ADAPTERS else [])):
            (step, found), (expected_step, expected) = state(run_dir / folder), state(whole / folder)
            assert step == expected_step
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert curve(run_dir) == curve(whole)
        assert names(run_dir) == names(whole)


def test_encoding_killed_again_and_again_ends_byte_equal(finished_run, tmp_path, num_kills, rng):
    draw = np.random.default_rng(0)
    words = ["apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder"]
    corpus = tmp_path / "corpus.jsonl"
    texts = [" ".join(draw.choice(words, draw.integers(1, 12))) for _ in range(50000)]
    corpus.write_text("".join(json.dumps({"_id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(texts)))
    out_dirs = [tmp_path / str(number) for number in range(RUNS_PER_KILL * num_kills + 2)]
    argv = [[f"--run_dir={finished_run}", f"--corpus={corpus}", f"--out_dir={out_dir}"] for out_dir in out_dirs]
    argv = [[*list_, "--texts_per_shard=500"] for list_ in argv]
    finished = killed("encode corpus", argv, [out_dir / "progress.json" for out_dir in out_dirs], num_kills, rng)
    whole, *others = [{path.name: path.read_bytes() for path in out_dir.iterdir()} for out_dir in out_dirs[:finished]]
    assert others
    assert sorted(whole) == ["checksums.json", "embeddings.npy", "ids.json", "manifest.json"]
    for other in others:
        assert other == whole
    assert load_run(finished_run).step == 20


def test_a_run_that_mines_itself_killed_again_and_again_ends_bit_equal(dataset_dir, tmp_path, num_kills, rng):
    run_dirs = [tmp_path / str(number) for number in range(RUNS_PER_KILL * num_kills + 2)]
    changes = {
        **ALL_DEVICES,
        "Recipe__loss": "@ance",
        "HardNegatives__miner": "@Miner()",
        "HardNegatives__mine_every_steps": 20,
        "Optimization__num_steps": 100,
        "Logging__save_every_steps": 4,
        "Logging__log_every_steps": 3,
        "Logging__evaluate_every_steps": 50,
        "PairsOptions__negatives_dir": "{run_dir}/negatives",
        "PairsOptions__num_neg_docs": 2,
        "Miner__last_rank": 20,
        "ance__temperature": 0.05,
    }
    argv = [arguments(dataset_dir, run_dir, recipe="recipes/sde.gin", **changes) for run_dir in run_dirs]
    argv = [[one for one in list_ if not one.startswith("--gin.samtone")] for list_ in argv]
    finished = killed("train", argv, [run_dir / "negatives" / "*" for run_dir in run_dirs], num_kills, rng)
    whole, *others = run_dirs[:finished]
    assert others
    switches = (whole / "switches.jsonl").read_text()
    assert len(switches.splitlines()) == 5
    for run_dir in others:
        (step, found), (expected_step, expected) = state(run_dir / "checkpoints"), state(whole / "checkpoints")
        assert step == expected_step
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert (run_dir / "switches.jsonl").read_text() == switches
        assert curve(run_dir) == curve(whole)
        assert names(run_dir) == names(whole)
        for part in (whole / "negatives").glob("*/*.npy"):
            assert (run_dir / "negatives" / part.parent.name / part.name).read_bytes() == part.read_bytes()


WRITERS = {
    "import pairs": "{table} --tokenizer={spiece} --dev_fraction=0.1 --out_dir={out}",
    "import openqa": "--passages={passages} --train={questions} --out_dir={out}",
    "import negatives": "{mined} --dataset_dir={data} --negatives_dir={out}",
    "import model": "--from={exported} --run_dir={out}",
    "export model": "--run_dir={run} --format=sentence_transformers --out_dir={out}",
    "export negatives": "{negatives} --out={out}",
    "export index": "--run_dir={run} --dataset_dir={data} --to=parquet --out={out}",
    "search": "--run_dir={run} --dataset_dir={data} --topics={data}/queries.jsonl --out={out}",
    "mine pairs": "--run_dir={run} --dataset_dir={data} --last_rank=20 --negatives_dir={out}",
    "score pairs": "--model={run} --dataset_dir={data} --negatives_dir={negatives} --out_dir={out}",
    "encode guide": "--model={run} --dataset_dir={data} --out_dir={out}",
    "analyse data": "{table} --out_dir={out}",
    "analyse run": "--run_dir={run} --out_dir={out}",
    "import pydocs": "--max_docs=200 --no_packages --num_processes=1 --out_dir={out}",
    "import task": "--task=kills --module=de_jax.tasks.beir --module_arg dataset_dir={data} --module_arg tokenizer={spiece} "
    "--out_dir={out}",
    "doc2query generate": "--model={generator} --dataset_dir={data} --num_queries=2 --max_length=4 --docs_per_part=20 "
    "--max_doc_length=16 --out_dir={out}",
    "doc2query import": "--predictions={predicted} --dataset_dir={data} --docs_per_part=20 --out_dir={out}",
}
"""Commands with an output, by their flags. Those that train or encode a corpus are killed above."""
AT_ONCE = {"export negatives", "export model"}
"""Commands whose output is whole once it is there, and refused then."""
ELSEWHERE = {"train", "mine", "encode corpus"}
CLOCKS = re.compile(rb'"(?:seconds|[a-z_]+_seconds|created)": (?:\{[^}]*\}|[^,}\s]+)')
"""Times in JSON."""


def test_every_command_with_an_output_is_killed_or_named():
    outputs = {"out_dir", "out", "negatives_dir"}
    writing = {verb for verb in cli.VERBS if outputs & {flag.name for flag in cli.command_of(verb).flags}}
    assert writing - {*WRITERS, *ELSEWHERE} == set()


@pytest.fixture(scope="module")
def inputs(finished_run, dataset_dir, tmp_path_factory):
    """The inputs of the commands, by their names in `WRITERS`."""
    folder = tmp_path_factory.mktemp("inputs")
    pairs = [(f"{word} {number}", f"{word} of {number} and {number * 7}") for number in range(500) for word in ("river", "comet")]
    with open(folder / "qa.csv", "w", newline="") as file:
        csv.writer(file).writerows([("query", "doc"), *pairs])
    rows = [f"{number}\t{doc}\tabout\n" for number, (_, doc) in enumerate(pairs)]
    (folder / "passages.tsv").write_text("".join(["id\ttext\ttitle\n", *rows]))
    passages = [
        {"question": query, "positive_ctxs": [{"passage_id": str(number), "text": "", "title": ""}]}
        for number, (query, _) in enumerate(pairs)
    ]
    (folder / "questions.json").write_text(json.dumps([{"answers": ["river"], **one} for one in passages]))
    run = {f"q{query}": {f"d{(query + step) % 96}": 1.0 / step for step in range(1, 20)} for query in range(80)}
    metrics.write_trec_run(folder / "mined.trec", run)
    docs = [{"id": f"d{number}", "predicted_queries": [f"what is {number}"]} for number in range(96)]
    (folder / "predicted.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    negatives, exported, generator = folder / "negatives", folder / "exported", folder / "generator"
    spiece = dataset_dir / "spiece.model"
    sizes = ["--num_steps=1", "--batch_size=8", "--max_query_length=8", "--max_doc_length=16", "--dtype=float32"]
    with pytest.MonkeyPatch.context() as patch:
        smallest = T5Config(model_dim=32, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32)
        patch.setitem(doc2query.SIZES, "tiny", smallest)
        new = [f"--tokenizer={spiece}", "--size=tiny", f"--run_dir={generator}"]
        cli.call("doc2query train", [f"--dataset_dirs={dataset_dir}", *new, *sizes])
    cli.call("import negatives", [str(folder / "mined.trec"), f"--dataset_dir={dataset_dir}", f"--negatives_dir={negatives}"])
    cli.call("export model", [f"--run_dir={finished_run}", "--format=sentence_transformers", f"--out_dir={exported}"])
    found = {"run": finished_run, "data": dataset_dir, "spiece": spiece, "negatives": negatives}
    named = {"table": "qa.csv", "passages": "passages.tsv", "questions": "questions.json", "mined": "mined.trec"}
    named |= {"predicted": "predicted.jsonl", "generator": "generator"}
    return found | {"exported": exported} | {name: folder / file for name, file in named.items()}


def everything(folder):
    """The bytes of all files of a folder by name, also of those whose names begin with a point.

    Times are left out; of checkpoints, whose names and contents have times too, the parameters stand for all.
    """
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = {name: CLOCKS.sub(b"", path.read_bytes()) for name, path in files.items() if "/checkpoints/" not in name}
    if checkpoints := list(folder.glob("*/checkpoints/*/params")):
        restored = [ocp.PyTreeCheckpointer().restore(path) for path in checkpoints]
        found["parameters"] = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(restored))
    return found


@pytest.mark.parametrize("verb", WRITERS)
def test_a_command_killed_again_and_again_ends_byte_equal_and_leaves_nothing_beside(inputs, tmp_path, num_kills, rng, verb):
    homes = [tmp_path / str(number) for number in range(RUNS_PER_KILL * num_kills + 2)]
    for home in homes:
        home.mkdir()
    suffix = {"export negatives": ".jsonl.gz", "export index": ".parquet"}.get(verb, "")
    outs = [home / f"made{suffix}" for home in homes]
    argv = [shlex.split(WRITERS[verb].format(**inputs, out=out)) for out in outs]
    finished = killed(verb, argv, [home / ".*" for home in homes], num_kills, rng, **({"made": outs} if verb in AT_ONCE else {}))
    whole, *others = [everything(home) for home in homes[:finished]]
    assert others
    for other in others:
        assert other == whole
