"""Every command of the page for whoever has a TPU or a GPU runs, in small, on files of the official formats."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tiny_run

from de_jax import cli

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SIZES = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "vocab_size": 30, "dtype": "float32"}
SMALL = {
    **{f"T5Config.{name}": value for name, value in SIZES.items()},
    "PairsOptions.batch_size": 2, "Optimization.num_steps": 3, "Logging.log_every_steps": 1, "make_mesh.data": 1,
}  # fmt: skip
COMMANDS = {
    "gsutil": 'cp -r "$OFFICIAL/${4#gs://}" "$5"',
    "curl": 'cp "$OFFICIAL/${2#https://}" .',
    "python": 'exec "$PYTHON" "$@"',
    "python3": 'exec "$PYTHON" "$@"',
    "de-jax": """
verb=$1; shift; small=
if [ $verb = train ] || [ $verb = plan ]; then small=$SMALL; fi
exec "$PYTHON" -m de_jax $verb "${@/--topology=*/--topology=cpu:8}" $small
""",
}
"""Programs that fetch, from a folder of official files; and those that take small settings beside the page's."""


def write_official(folder, work):
    """T5X's checkpoint and vocabulary, and BEIR's archive, where the page fetches them from."""
    run = tiny_run.write_run(work, steps=(1,))
    cli.call("export model", [f"--run_dir={run}", "--format=t5x", f"--out_dir={work / 't5x'}"])
    checkpoint = folder / "t5-data/pretrained_models/t5x/t5_1_1_base/checkpoint_1000000"
    shutil.copytree(work / "t5x" / "checkpoint_1", checkpoint)
    spiece = folder / "huggingface.co/google/t5-v1_1-base/resolve/main/spiece.model"
    archive = folder / "public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/msmarco.zip"
    for file in (spiece, archive):
        file.parent.mkdir(parents=True)
    shutil.copy(work / "spiece.model", spiece)
    with zipfile.ZipFile(archive, "w") as file:
        for kind, rows in (("corpus", [f'{{"_id": "{name}", "title": "", "text": "{text}"}}' for name, _, text in tiny_run.DOCS]),
                           ("queries", [f'{{"_id": "{name}", "text": "{text}"}}' for name, text in tiny_run.QUERIES])):  # fmt: skip
            file.writestr(f"msmarco/{kind}.jsonl", "".join(f"{row}\n" for row in rows))
        for split, pairs in (("train", (("q0", "d0"), ("d3", "d6"), ("q2", "d2"))), ("dev", (("q0", "d5"), ("q2", "d2")))):
            lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{doc}\t1" for query, doc in pairs)]
            file.writestr(f"msmarco/qrels/{split}.tsv", "".join(f"{line}\n" for line in lines))


@pytest.mark.soak
def test_every_command_of_the_page_runs_in_small(tmp_path):
    official, home, programs = (tmp_path / name for name in ("official", "home", "bin"))
    for folder in (official, home, programs, tmp_path / "made"):
        folder.mkdir()
    write_official(official, tmp_path / "made")
    for name, text in COMMANDS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    small = " ".join(f"--gin.{name}={value}" for name, value in SMALL.items())
    own = {"OFFICIAL": str(official), "PYTHON": sys.executable, "SMALL": small, "PYTHONPATH": str(ROOT), "HOME": str(home)}
    environment = {**os.environ, **own, "PATH": f"{programs}:{os.environ['PATH']}", "DE_JAX_CACHE": str(tmp_path / "cache")}
    machine, *blocks = BLOCK.findall((ROOT / "docs/reference/base_row.md").read_text(encoding="utf-8"))
    assert "gcloud" in machine
    said = []
    for block in blocks:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=home, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr[-3000:]}"
        said.append(done.stdout)
    assert (home / "runs/base_sde_query/metrics.jsonl").read_text().count("learning_rate") == SMALL["Optimization.num_steps"]
    assert any('"P@1"' in text or "P@1" in text for text in said)
