"""Training and mining at addresses of real servers on the loopback: moto's for S3, gcp-storage-emulator for GCS.

pip install -e '.[buckets]' 'moto[server]' gcp-storage-emulator && python -m pytest -m soak tests/e2e/test_buckets.py
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from toy_run import ALL_DEVICES, arguments

from de_jax import cli, command
from de_jax.buckets.objects import Objects
from de_jax.models.t5 import T5Config
from de_jax.tools import doc2query
from de_jax.training.run import run_log

TESTS = Path(__file__).resolve().parents[1]
MACHINE, GCS_SERVER = TESTS / "bucket_machine.py", TESTS / "gcs_server.py"
BUCKET = "de-jax-tests"
CHANGES = {
    "Optimization__num_steps": 60,
    "Logging__save_every_steps": 5,
    "Logging__log_every_steps": 3,
    "Logging__evaluate_every_steps": 20,
}
NUM_KILLS, NUM_SWITCHES = 3, 3
MINED = {
    **ALL_DEVICES,
    "Recipe__loss": "@ance",
    "Optimization__learning_rate": 0.005,
    "linear__end": 0.005,  # the same schedule whatever the number of steps
    "Optimization__num_steps": 100_000,
    "Logging__save_every_steps": 30,
    "Logging__evaluate_every_steps": 100_000,
    "PairsOptions__negatives_dir": "{run_dir}/negatives",
    "PairsOptions__num_neg_docs": 2,
    "ance__temperature": 0.05,
}
PARTS = ["--texts_per_shard=32"]
"""Three blocks of the toy documents, so that two jobs have some each."""
LEASE = 20
"""Seconds: machines of a test are slow."""
MINER = {"HardNegatives__miner": "@Miner()", "HardNegatives__follow_every_steps": 5, "Miner__last_rank": 20}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request):
    """The address of an empty bucket."""
    pytest.importorskip("moto")
    pytest.importorskip("gcp_storage_emulator")
    for client in ("s3fs", "gcsfs"):
        pytest.importorskip(client)
    import fsspec

    port = free_port()
    programs = Path(sys.executable).parent
    argv = {
        "s3": [programs / "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        "gs": [sys.executable, GCS_SERVER, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"],
    }[request.param]
    if request.param == "gs":
        argv.append(f"--default-bucket={BUCKET}")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.2)
            files = fsspec.filesystem(request.param, skip_instance_cache=True, use_listings_cache=False)
            if request.param == "s3":
                files.mkdir(BUCKET)
            yield f"{request.param}://{BUCKET}"
        finally:
            server.kill()
            server.wait()


def client(address):
    import fsspec

    return fsspec.filesystem(address.partition("://")[0], skip_instance_cache=True, use_listings_cache=False)


def listing(address):
    """The objects below an address, by their names there; those of owners aside."""
    place = address.partition("://")[2]
    return {path.removeprefix(f"{place}/") for path in client(address).find(place) if "/.owners/" not in path}


class Address(str):
    def __truediv__(self, name):
        return Address(f"{self}/{name}")


def start(cache, verb, argv, environment=(), **faults):
    own = {"DE_JAX_CACHE": str(cache), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.Popen(
        [sys.executable, str(MACHINE), json.dumps(faults), *verb.split(), *argv],
        env={**os.environ, **own, **dict(environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slurm(number):
    """The variables of one of two jobs under SLURM, for `--distributed`."""
    found = {"JOB_ID": "7", "STEP_NODELIST": "host[0-1]", "NTASKS": "2", "PROCID": str(number), "LOCALID": "0"}
    return {f"SLURM_{name}": value for name, value in found.items()}


def wait_for(condition, process):
    """Until a condition holds while a process runs."""
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kill(process):
    process.kill()
    process.communicate()


def finish(process, code=0):
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, err[-4000:]
    return out, err


def copy_of(cache, address):
    return Path(cache) / "buckets" / address.replace("://", "/")


def parts_of(cache, address):
    """The copy of the folder of parts beside an address."""
    copy = copy_of(cache, address)
    return copy.with_name(f"{copy.name}.parts")


def state(folder):
    """All arrays of the newest checkpoint in a folder of them."""
    newest = max(int(path.name) for path in folder.iterdir())
    return newest, [
        jax.tree.map(np.asarray, ocp.PyTreeCheckpointer().restore(folder / str(newest) / part)) for part in ("params", "training")
    ]


def curve(run_dir):
    lines = run_log.read_metrics(run_dir / run_log.METRICS_FILE)
    return [{name: value for name, value in line.items() if name != "pairs_per_second"} for line in lines]


def mined(dataset_dir, run_dir, **changes):
    found = arguments(dataset_dir, run_dir, recipe="recipes/sde.gin", **(MINED | changes))
    return [one for one in found if not one.startswith("--gin.samtone")]


def assert_same_run(run_dir, whole):
    for folder in ("checkpoints", "best"):
        (step, found), (expected_step, expected) = state(run_dir / folder), state(whole / folder)
        assert step == expected_step
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert curve(run_dir) == curve(whole)


def assert_all_there(address, run_dir):
    """The bucket has the files of the folder, and no others."""
    here = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file() and path.name != ".owner"}
    there = {re.sub(r"~\d+/", "/", name) for name in listing(address)}
    tensorboard = {name for name in there if name.startswith("tensorboard/")}
    assert there - tensorboard == here - tensorboard


@pytest.fixture(scope="module")
def whole(dataset_dir, tmp_path_factory):
    """An undisturbed run on a disk."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder / "cache", "train", arguments(dataset_dir, folder / "run", **CHANGES)))
    return folder / "run"


def test_a_run_killed_while_it_uploads_continues_on_other_machines_bit_equal(bucket, whole, dataset_dir, tmp_path):
    client(bucket).put(str(dataset_dir), f"{BUCKET}/toy", recursive=True)
    data, address = Address(f"{bucket}/toy"), f"{bucket}/killed/run"
    argv = arguments(data, address, **CHANGES)

    def half_uploaded():
        """The steps of checkpoints that are there in part."""
        names = {name for name in listing(address) if name.startswith("checkpoints/")}
        folders = {"/".join(name.split("/")[:2]) for name in names}
        return {int(re.split("[/~]", folder)[1]) for folder in folders if f"{folder}/_CHECKPOINT_METADATA" not in names}

    for number in range(NUM_KILLS):
        process = start(tmp_path / str(number), "train", argv, slow=0.3, step=0.5 if number else 2.0)
        deadline = time.monotonic() + 600
        while not any(step > 15 * number for step in half_uploaded()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
        if not number:
            second = start(tmp_path / "second", "train", argv)
            _, err = finish(second, command.EXIT_INPUT)
            assert f"is training in {address} already; stop it first." in err.splitlines()[-1]
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(tmp_path / "last", "train", argv))
    copy = copy_of(tmp_path / "last", address)
    assert_same_run(copy, whole)
    assert_all_there(address, copy)


def test_a_bucket_that_loses_and_refuses_writes_has_the_whole_run_at_the_end(bucket, whole, dataset_dir, tmp_path):
    address = f"{bucket}/lossy/run"
    argv = arguments(dataset_dir, address, **CHANGES)
    finish(start(tmp_path / "lossy", "train", argv, lost=0.02, failed=0.005))
    assert_all_there(address, copy_of(tmp_path / "lossy", address))
    assert_same_run(copy_of(tmp_path / "lossy", address), whole)
    finish(start(tmp_path / "fresh", "analyse run", [f"--run_dir={address}"]))
    step, found = state(copy_of(tmp_path / "fresh", address) / "checkpoints")
    assert step == 60
    jax.tree.map(np.testing.assert_array_equal, found, state(whole / "checkpoints")[1])
    assert curve(copy_of(tmp_path / "fresh", address)) == curve(whole)


def test_a_miner_on_another_machine_and_its_trainer_meet_in_the_bucket(bucket, dataset_dir, tmp_path):
    address = f"{bucket}/mined/run"
    argv = mined(dataset_dir, address, **MINER)
    trainer = start(tmp_path / "trainer", "train", argv, step=0.05)
    miner = start(tmp_path / "miner", "mine", [*argv, "--poll_seconds=0.05"])
    switches_file = copy_of(tmp_path / "trainer", address) / "switches.jsonl"
    deadline = time.monotonic() + 1200
    while not switches_file.exists() or switches_file.read_text().count("\n") < NUM_SWITCHES:
        assert (trainer.poll(), miner.poll()) == (None, None), [one.communicate() for one in (trainer, miner)]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    trainer.send_signal(signal.SIGTERM)
    step = json.loads(finish(trainer, command.EXIT_STOPPED)[0])["step"]
    miner.kill()
    assert len(miner.communicate()[0].splitlines()) >= NUM_SWITCHES - 1
    switches = [json.loads(line) for line in switches_file.read_text().splitlines()]
    assert {f"negatives/{one['generation']:06d}/manifest.json" for one in switches} <= listing(address)
    finish(start(tmp_path / "reader", "analyse run", [f"--run_dir={address}"]))
    copy, again = copy_of(tmp_path / "reader", address), tmp_path / "again"
    shutil.copytree(copy / "negatives", again / "negatives")  # the same negatives and switches, without a miner, on a disk
    shutil.copy(copy / "switches.jsonl", again)
    finish(start(tmp_path / "cache", "train", mined(dataset_dir, again, Optimization__num_steps=step)))
    jax.tree.map(np.testing.assert_array_equal, state(copy / "checkpoints"), state(again / "checkpoints"))


def test_jobs_on_machines_of_their_own_write_what_one_job_writes(bucket, whole, dataset_dir, tmp_path):
    client(bucket).put(str(whole), f"{BUCKET}/jobs/run", recursive=True)
    run, out = f"{bucket}/jobs/run", f"{bucket}/jobs/out"
    argv = [f"--run_dir={run}", "--step=60", f"--dataset_dir={dataset_dir}", *PARTS]

    def job(cache, number, **faults):
        own = [f"--out_dir={out}", "--distributed"]
        return start(tmp_path / cache, "encode corpus", [*argv, *own], slurm(number), **faults)

    killed = job("killed", 0, slow=3600)  # it never sends the last file of its part
    wait_for((parts_of(tmp_path / "killed", out) / "0_of_2" / "manifest.json").exists, killed)
    kill(killed)
    for process in [job("one", 0), job("two", 1)]:
        assert "shard" in json.loads(finish(process)[0])
    assert "dim" in json.loads(finish(start(tmp_path / "joins", "encode corpus", [*argv, f"--out_dir={out}"]))[0])
    assert not {name for name in listing(f"{bucket}/jobs") if ".parts/" in name}
    finish(start(tmp_path / "one", "encode corpus", [*argv, f"--out_dir={tmp_path / 'alone'}"]))
    finish(start(tmp_path / "reader", "encode corpus", [*argv, f"--out_dir={out}"]))
    for name in ("embeddings.npy", "ids.json"):
        assert (copy_of(tmp_path / "reader", out) / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


@pytest.fixture(scope="module")
def generator(dataset_dir, tmp_path_factory):
    """A run of the smallest generator of queries."""
    folder = tmp_path_factory.mktemp("generator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(folder / "cache"))
        patch.setitem(doc2query.SIZES, "tiny", T5Config(model_dim=32, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32))
        data = [f"--dataset_dirs={dataset_dir}", f"--tokenizer={dataset_dir / 'spiece.model'}", "--batch_size=8"]
        cli.call("doc2query train", [*data, "--num_steps=1", "--max_doc_length=32", f"--run_dir={folder / 'run'}"])
    return folder / "run"


def test_jobs_on_machines_of_their_own_generate_what_one_job_generates_though_one_is_killed_as_it_joins(
    bucket, generator, dataset_dir, tmp_path
):
    client(bucket).put(str(generator), f"{BUCKET}/generated/run", recursive=True)
    client(bucket).put(str(dataset_dir), f"{BUCKET}/generated/toy", recursive=True)
    run, out = f"{bucket}/generated/run", f"{bucket}/generated/out"
    sizes = ["--num_queries=2", "--max_length=8", "--docs_per_batch=8", "--docs_per_part=16"]
    argv = [f"--model={run}", "--step=1", f"--dataset_dir={bucket}/generated/toy", *sizes]

    def job(cache, *which, environment=(), **faults):
        own = [f"--out_dir={out}", *which]
        return start(tmp_path / cache, "doc2query generate", [*argv, *own], environment, **faults)

    killed = job("zero", "--shard=0/2", slow=3600)  # it never sends its part
    part = parts_of(tmp_path / "zero", out) / "0_of_2"
    wait_for((part / "manifest.json").exists, killed)
    kill(killed)
    (part / "manifest.json").unlink()
    (part / "part-00002.jsonl.gz").unlink()
    before = (part / "part-00001.jsonl.gz").stat()
    assert json.loads(finish(job("zero", "--shard=0/2"))[0]) == {"shard": "0/2"}
    assert (part / "part-00001.jsonl.gz").stat() == before  # it went on where it was
    finish(job("another", "--distributed", environment=slurm(1)))
    killed = job("one", slow=3600, slow_at=out)  # it joins, and never sends the result
    wait_for((copy_of(tmp_path / "one", out) / "manifest.json").exists, killed)
    kill(killed)
    assert "num_docs" in json.loads(finish(job("three"))[0])
    finish(start(tmp_path / "alone", "doc2query generate", [*argv, f"--out_dir={tmp_path / 'whole'}"]))
    written = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {name: Objects(out).read(name) for name in listing(out)} == written
    assert not {name for name in listing(f"{bucket}/generated") if ".parts/" in name and not name.endswith(".lock")}
    finish(job("zero", "--shard=0/2"))  # started again by a scheduler


def test_files_of_any_bytes_arrive_as_they_are(bucket, tmp_path):
    for number, data in enumerate((b"", b"\r", b"\n", b"weights\r", b"weights\n\r", b"--==0==--", b"a\n--==0==\nb")):
        (tmp_path / "file").write_bytes(data)
        size = Objects(f"{bucket}/bytes").put(str(number), tmp_path / "file")
        assert Objects(f"{bucket}/bytes").read(str(number)) == data
        assert Objects(f"{bucket}/bytes").list()[str(number)].size == size == len(data)


@pytest.mark.parametrize("size", [10, 2**20, 120 * 2**20])
def test_an_object_is_created_once_whatever_its_size(bucket, tmp_path, size):
    """Below the limits of one request, above that of the clients' resumable uploads, and above that of multipart uploads."""
    (tmp_path / "file").write_bytes(b"1" * size)
    objects = Objects(f"{bucket}/created")
    objects.put(str(size), tmp_path / "file", is_new=True)
    (tmp_path / "file").write_bytes(b"2" * size)
    for content in (tmp_path / "file", b"2"):
        with pytest.raises(FileExistsError):
            objects.put(str(size), content, is_new=True)
    assert objects.read(str(size)) == b"1" * size


def test_two_processes_share_a_copy_or_are_refused(bucket, whole, dataset_dir, tmp_path):
    address = f"{bucket}/two/run"
    argv = [*arguments(dataset_dir, address, **CHANGES, make_mesh__data=-1), "--num_processes=2", "--lost_after_seconds=60"]
    for caches in (("own0", "own1"), ("shared", "shared")):
        where = f"--coordinator_address=127.0.0.1:{free_port()}"
        both = [start(tmp_path / cache, "train", [*argv, where, f"--process_id={number}"]) for number, cache in enumerate(caches)]
        if caches[0] != caches[1]:
            for process in both:
                _, err = finish(process, command.EXIT_INPUT)
                assert "have copies of their own; set DE_JAX_CACHE to a folder that all of them see." in err
    for process in both:
        finish(process)
    assert_all_there(address, copy_of(tmp_path / "shared", address))


def test_commands_read_and_write_addresses(bucket, whole, dataset_dir, tmp_path):
    client(bucket).put(str(dataset_dir), f"{BUCKET}/commands/toy", recursive=True)
    client(bucket).put(str(whole), f"{BUCKET}/commands/run", recursive=True)
    run, data, out = (f"{bucket}/commands/{name}" for name in ("run", "toy", "out"))
    cache = tmp_path / "cache"
    done = {
        "encode corpus": [f"--run_dir={run}", f"--dataset_dir={data}", f"--out_dir={out}/embeddings"],
        "evaluate beir": [f"--run_dir={run}", f"--dataset_dir={data}", "--split=dev", "--no_bm25"],
        "export model": [f"--run_dir={run}", "--format=safetensors", f"--out_dir={out}/exported"],
        "mine pairs": [f"--run_dir={run}", f"--dataset_dir={data}", f"--negatives_dir={out}/negatives", "--last_rank=20"],
    }
    for verb, argv in done.items():
        finish(start(cache, verb, argv))
    there = listing(out)
    assert {"embeddings/manifest.json", "embeddings/checksums.json", "exported/model.json"} <= there
    assert "negatives/000001/manifest.json" in there
    assert any(name.startswith("evaluations/") and name.endswith("result.json") for name in listing(run))
    found = [f"--run_dir={run}", f"--dataset_dir={data}", f"--embeddings_dir={out}/embeddings", "--query=apple 3", "--k=1"]
    assert json.loads(finish(start(tmp_path / "other", "search", found))[0])["results"]
