"""A command on the machines of a Ray cluster: what it writes, whatever process or machine is lost, are the bytes of one host."""

import contextlib
import io
import json
import shutil
import threading

import psutil
import pytest
import tiny_run
from ray.cluster_utils import Cluster

from de_jax import cli, engine
from de_jax.data.negatives import generations
from de_jax.retrieval import parts
from de_jax.types import InputError


def test_a_task_has_a_gpu_or_the_tpus_of_a_host_or_a_machine_without_either():
    assert engine._places([{"CPU": 8.0}, {"CPU": 4.0}, {"memory": 1.0}]) == ({"num_cpus": 4.0}, 2)
    assert engine._places([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0}]) == ({"num_gpus": 1, "num_cpus": 0}, 6)
    assert engine._places([{"CPU": 96.0, "TPU": 4.0}] * 3) == ({"resources": {"TPU": 4}, "num_cpus": 0}, 3)


def test_tasks_get_all_flags_but_the_engines():
    assert engine._without_own(["--engine=ray", "--num_shards", "4", "--step=3", "a"]) == ["--step=3", "a"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_run.write_dataset(folder / "tiny"), tiny_run.write_run(folder / "run")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Machines with one processor each, and one that only joins them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        started.machines = [started.add_node(num_cpus=1) for _ in range(2)]
        patch.setenv("RAY_ADDRESS", started.address)
        yield started
        started.shutdown()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def printed(tool, flags):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.call(tool, [*flags])
    (line,) = out.getvalue().splitlines()
    return json.loads(line)


@contextlib.contextmanager
def losing(begun, lose):
    """Loses something as soon as a part of an output was begun."""

    over = threading.Event()

    def watch():
        while not list(begun.parent.glob(begun.name)):
            if over.wait(0.01):
                return
        lose()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def kill_a_task():
    (task, *_) = (one for one in psutil.Process().children(recursive=True) if "ray::_run" in "".join(one.cmdline()))
    task.kill()


@pytest.mark.soak
def test_the_shards_of_a_lost_machine_are_encoded_elsewhere(inputs, cluster, tmp_path):
    dataset_dir, run_dir = inputs
    flags = [f"--run_dir={run_dir}", f"--dataset_dir={dataset_dir}", "--step=7", "--texts_per_shard=1", "--tokens_per_batch=256"]
    one, whole = printed("encode corpus", [*flags, f"--out_dir={tmp_path / 'one'}"]), tmp_path / "many"
    with losing(parts.folder_of(whole) / "*", lambda: cluster.remove_node(cluster.machines[0], allow_graceful=False)):
        many = printed("encode corpus", [*flags, f"--out_dir={whole}", "--engine=ray", "--num_shards=5"])
    assert many == {**one, "out_dir": str(whole)}
    assert files_of(whole) == files_of(tmp_path / "one")
    assert not parts.folder_of(whole).exists()


@pytest.mark.soak
def test_the_shard_of_a_killed_task_is_encoded_again_and_what_is_mined_is_the_same(inputs, cluster, tmp_path):
    dataset_dir, run_dir = inputs
    runs = [shutil.copytree(run_dir, tmp_path / name) for name in ("one", "many")]
    flags = [f"--dataset_dir={dataset_dir}", "--step=7", "--texts_per_shard=2", "--num_neg_docs=3"]
    printed("mine pairs", [*flags, f"--run_dir={runs[0]}"])
    with losing(runs[1] / "embeddings" / "*" / "*.parts" / "*", kill_a_task):
        printed("mine pairs", [*flags, f"--run_dir={runs[1]}", "--engine=ray", "--num_shards=3"])
    one, many = (files_of(generations.open_newest(run / "negatives").folder) for run in runs)
    assert {name: data for name, data in one.items() if name.endswith(".npy")} == {
        name: data for name, data in many.items() if name.endswith(".npy")
    }


@pytest.mark.soak
def test_other_work_is_spread_too_and_a_users_error_is_the_commands(inputs, cluster, tmp_path):
    dataset_dir, run_dir = inputs
    flags = [f"--dataset_dir={dataset_dir}", f"--model={run_dir}"]
    printed("score pairs", [*flags, f"--out_dir={tmp_path / 'one'}"])
    printed("score pairs", [*flags, f"--out_dir={tmp_path / 'many'}", "--engine=ray"])
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    with pytest.raises(InputError, match="has no split 'none'"):
        cli.call("score pairs", [*flags, "--split=none", f"--out_dir={tmp_path / 'none'}", "--engine=ray"])
