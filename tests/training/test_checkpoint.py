"""Checkpoints that are damaged, half-copied, or cannot be written."""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from de_jax.files import folders
from de_jax.training.hooks.faults import NonFiniteError
from de_jax.training.run import checkpoint
from de_jax.training.run.checkpoint import Checkpoints, SaveCheckpoints
from de_jax.training.run.run_folder import restore_params
from de_jax.types import InputError, TrainState


def state(step=1, size=64):
    draw = np.random.default_rng(step).normal
    params = {"query": {"kernel": jnp.asarray(draw(size=(size, size)), jnp.float32)}, "shared": {"scale": jnp.ones((3,))}}
    opt_state = {"momentum": jnp.asarray(draw(size=(size, size)), jnp.float32)}
    return TrainState(jnp.int32(step), params, opt_state, jax.random.key_data(jax.random.key(step)))


def saved(folder, steps=(1, 2)):
    with contextlib.closing(Checkpoints(folder, keep=5)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"step": step})
    return folder


def restored(folder, step):
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        return checkpoints.restore(step, state())


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("intact") / "checkpoints")


def refusal(folder, step):
    """Why a step cannot be restored, or None where it can; then it is what was saved."""
    try:
        assert_equal(restored(folder, step), state(step))
    except InputError as error:
        return str(error)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(Path.unlink, id="missing", marks=pytest.mark.soak),
        pytest.param(cut, id="cut"),
        pytest.param(lambda file: file.write_bytes(b""), id="empty", marks=pytest.mark.soak),
    ],
)
def test_every_damaged_file_is_either_needless_or_leads_to_the_newest_intact_checkpoint(intact, tmp_path, damage):
    names = [file.relative_to(intact) for file in (intact / "2").rglob("*") if file.is_file()]
    num_refused = 0
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(intact, folder)
        damage(folder / name)
        message = refusal(folder, 2)
        if message:
            num_refused += 1
            assert message.startswith(f"the checkpoint {folder}/2 is damaged or half-copied ("), name
            assert message.endswith("delete that folder to continue from an older one.")
            assert "\n" not in message
            assert_equal(restored(folder, 1), state(1))
    assert num_refused >= 6  # the arrays' descriptions, the manifests and the data of both parts


def message_of(checkpoints):
    """Why step 2 cannot be restored by checkpoints that are open, or None where it is what was saved."""
    try:
        assert_equal(checkpoints.restore(2, state()), state(2))
        assert checkpoints.beside(2) == {"step": 2}
    except InputError as error:
        return str(error)


def test_a_flipped_bit_is_refused_with_its_file_or_changes_nothing(intact, tmp_path):
    """In parameters that Orbax does not compress, most flips gave other numbers without a word."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(intact / "2", folder / "2")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    draw, refused = np.random.default_rng(0), set()
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        for path in [*paths, *draw.choice(paths, 150)]:
            before = path.read_bytes()
            bits = np.frombuffer(before, np.uint8).copy()
            bits[draw.integers(len(bits))] ^= 1 << draw.integers(8)
            path.write_bytes(bits.tobytes())
            if message := message_of(checkpoints):
                refused.add(path.name)
                assert path.name in message or path.name == "checksums.json"
            path.write_bytes(before)
        assert message_of(checkpoints) is None
    assert {path.name for path in paths} - refused <= {"_CHECKPOINT_METADATA", "checksums.json"}
    (folder / "2" / "_CHECKPOINT_METADATA").write_bytes(b"\xff")
    assert refusal(folder, 2) is None


def test_a_checkpoint_appears_with_its_checksums_or_not_at_all(tmp_path, monkeypatch):
    def full_disk(*args):
        raise OSError(28, "No space left on device")

    with contextlib.closing(Checkpoints(tmp_path, keep=5)) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
        monkeypatch.setattr(folders, "write_checksums", full_disk)
        checkpoints.save(2, state())
        with pytest.raises(InputError, match=r"\(No space left on device\); complete ones there: 1"):
            checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_small_arrays_of_many_devices_are_saved_without_a_program_for_each(tmp_path):
    """Orbax would compile one for each shape and device, while training waits."""
    compiled = []
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    with contextlib.closing(Checkpoints(tmp_path, keep=5)) as checkpoints:
        checkpoints.save(1, placed := jax.device_put(state(1, size=56), everywhere))
        checkpoints.wait()
        listen = lambda event, seconds, **about: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            jax.clear_caches()
            checkpoints.save(2, placed._replace(step=placed.step + 1))
            checkpoints.wait()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    shapes = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((placed.params, placed.opt_state))}
    assert len(compiled) <= 1 + len(shapes)  # the sum, and whether all is finite; not one for each device


@pytest.mark.parametrize("part", ["params", "training"])
def test_checkpoint_without_one_of_its_parts_is_refused(intact, tmp_path, part):
    shutil.copytree(intact, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "2" / part)
    with pytest.raises(InputError, match=r"copy/2 is damaged or half-copied .* continue from an older one"):
        restored(tmp_path / "copy", 2)


def test_what_stands_beside_a_state_comes_back_and_damage_to_it_is_named(intact, tmp_path):
    shutil.copytree(intact, tmp_path / "copy")
    with contextlib.closing(Checkpoints(tmp_path / "copy")) as checkpoints:
        assert checkpoints.beside(2) == {"step": 2}
    cut(tmp_path / "copy" / "2" / "beside" / "metadata")
    with contextlib.closing(Checkpoints(tmp_path / "copy")) as checkpoints, pytest.raises(InputError, match="copy/2 is damaged"):
        checkpoints.beside(2)


def test_a_checkpoint_says_whether_the_run_ended_with_it(intact, tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "run", keep=1)) as checkpoints:
        checkpoints.save(5, state(5), {checkpoint.ENDED: "no better"})
    assert checkpoint.end_of(tmp_path / "run", 5) == "no better"
    assert checkpoint.end_of(intact, 2) is None
    assert checkpoint.end_of(intact, 99) is None  # removed meanwhile


def test_a_reader_changes_nothing_and_the_writer_removes_what_was_left_unfinished(intact, tmp_path):
    folder = shutil.copytree(intact, tmp_path / "copy")
    (folder / "3.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (folder / ".probe.0123abcd.tmp").touch()
    names = sorted(path.name for path in folder.iterdir())
    restored(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == names
    Checkpoints(folder, keep=2).close()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_a_reader_does_not_mind_what_the_writer_removes_meanwhile(intact, tmp_path):
    folder = shutil.copytree(intact, tmp_path / "checkpoints")
    is_over = threading.Event()

    def come_and_go():
        while not is_over.is_set():
            (folder / "3").mkdir()
            (folder / "3").rmdir()

    writer = threading.Thread(target=come_and_go)
    writer.start()
    try:
        for _ in range(100):
            with contextlib.closing(Checkpoints(folder)) as checkpoints:
                assert set(checkpoints.steps()) >= {1, 2}
    finally:
        is_over.set()
        writer.join()
    assert refusal(folder, 2) is None


@pytest.mark.parametrize("part", ["", "params"])  # a trainer removes file by file
def test_a_reader_takes_the_successor_of_a_checkpoint_that_the_trainer_removes(intact, tmp_path, monkeypatch, part):
    folder = tmp_path / "checkpoints"
    shutil.copytree(intact / "1", folder / "1")
    restore = Checkpoints.restore_params

    def keep_one(checkpoints, step, like):
        if not (folder / "2").exists():
            shutil.copytree(intact / "2", folder / "2")
            shutil.rmtree(folder / "1" / part)
        return restore(checkpoints, step, like)

    monkeypatch.setattr(Checkpoints, "restore_params", keep_one)
    step, params = restore_params(tmp_path, None, state().params)
    assert step == 2
    assert_equal(params, state(2).params)
    with pytest.raises(InputError, match=r"does not have checkpoint 1; .* there: 2" if not part else "1 is damaged or half-copied"):
        restore_params(tmp_path, 1, state().params)


def test_old_checkpoints_that_a_kill_left_are_removed_on_demand_only(intact, tmp_path):
    folder = shutil.copytree(intact, tmp_path / "copy")
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        assert checkpoints.steps() == [1, 2]  # the newest may be damaged
        checkpoints.remove_old()
        assert checkpoints.steps() == [2]
    assert [path.name for path in folder.iterdir()] == ["2"]


def as_nobody(folder):
    """Read-only permissions bind everybody but root, so root becomes somebody else."""
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(0o555 if parent == folder else 0o755)
    if os.geteuid() == 0:
        os.seteuid(65534)


@pytest.fixture
def same_user_afterwards():
    yield
    if os.getuid() == 0:
        os.seteuid(0)


@pytest.mark.usefixtures("same_user_afterwards")
def test_read_only_folder_is_refused_before_any_work_and_can_still_be_read(tmp_path):
    folder = saved(tmp_path / "checkpoints")
    as_nobody(folder)
    with pytest.raises(PermissionError) as caught:
        Checkpoints(folder, keep=2)
    assert caught.value.filename == str(folder)
    assert_equal(restored(folder, 2), state(2))


def test_file_where_the_folder_should_be_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(InputError, match=r"checkpoints must be a folder, but .*checkpoints is a file"):
        Checkpoints(tmp_path / "checkpoints", keep=2)


TOLD = 'RESOURCE_EXHAUSTED: Error opening "zarr" driver: Failed writing: "/r/d/8da": Failed to write 477 bytes to file 4: No space'
SPEC = """[tensorstore_spec='{\\"context\\":{},\\"store_data_equal_to_fill_value\\":true}']"""


@pytest.mark.parametrize("told", [f"{TOLD} {SPEC} [os_error_code='28']", f"{TOLD} [os_error_code='28'] {SPEC}", OSError(28, "")])
def test_whatever_orbax_says_of_a_full_disk_the_system_s_words_are_told(intact, told):
    error = told if isinstance(told, OSError) else ValueError(told)
    expected = r"cannot be written to .*checkpoints \(No space left on device\); complete ones there: 1, 2\."
    with contextlib.closing(Checkpoints(intact)) as checkpoints, pytest.raises(InputError, match=expected), checkpoints._writing():
        raise error
    assert checkpoint._reason(ValueError(f"Not found: x {SPEC}")) == "Not found: x"


def test_what_is_missing_at_the_end_does_not_hide_the_first_fault(monkeypatch, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", lambda: Path("/dev/full").write_text("x"))
    monkeypatch.setattr(checkpoints._manager, "close", lambda: os.stat(tmp_path / "removed"))
    for ends in (checkpoints.wait, checkpoints.close):
        with pytest.raises(InputError, match=r"\(No space left on device\); complete ones there: none"):
            ends()


@pytest.mark.parametrize("num_bytes", [0, pytest.param(12288, marks=pytest.mark.soak), 1 << 19])
def test_full_disk_is_told_one_update_later_and_leaves_the_last_good_checkpoint_alone(small_disk, num_bytes):
    size = 512  # random numbers, so that they do not compress: 2 MiB a state
    checkpoints = Checkpoints(small_disk.folder / "checkpoints", keep=5)
    hook = SaveCheckpoints(checkpoints, every_steps=10, num_steps=1000)
    hook(10, state(10, size), {})
    checkpoints.wait()
    before = small_disk.files()
    small_disk.leave(num_bytes)
    expected = r"cannot be written to .*checkpoints \((No space left on device|File too large)\); complete ones there: 10\."
    with pytest.raises(InputError, match=expected) as caught:  # noqa: PT012
        for step in range(20, 30):  # only the first saves; the background needs a moment to fail
            hook(step, state(step, size), {})
            time.sleep(0.5)
    assert step < 29
    assert "\n" not in str(caught.value)
    assert small_disk.files() == before
    small_disk.free()
    with contextlib.suppress(InputError):  # a thread may have met an error of its own
        checkpoints.close()
    with contextlib.closing(Checkpoints(small_disk.folder / "checkpoints", keep=5)) as again:
        again.save(20, state(20, size))
    with contextlib.closing(Checkpoints(small_disk.folder / "checkpoints")) as again:
        assert again.steps() == [10, 20]
        assert_equal(again.restore(20, state(20, size)), state(20, size))


@pytest.mark.parametrize("part", ["params", "opt_state"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_state_that_is_not_finite_is_never_saved(tmp_path, part, value):
    with contextlib.closing(Checkpoints(tmp_path, keep=2)) as checkpoints:
        bad = state(3)
        bad = bad._replace(**{part: jax.tree.map(lambda leaf: leaf.at[0].set(value), getattr(bad, part))})
        with pytest.raises(NonFiniteError, match="after step 3 is not a finite number"):
            SaveCheckpoints(checkpoints, every_steps=1, num_steps=5)(3, bad, {"loss": jnp.asarray(1.0)})
        assert checkpoints.steps() == []
