"""Files that are complete or absent, and who may write them."""

import contextlib
import errno
import multiprocessing
import time
from pathlib import Path

import pytest

from de_jax import command, settings
from de_jax.data.expansion import generated_queries
from de_jax.files import addresses, folders, outputs, reading
from de_jax.training.run import recipe_file, run_log
from de_jax.types import InputError

HOLDERS, TIMES = 4, 25


def _hold(folder, log):
    for _ in range(TIMES):
        with outputs.in_turn(folder):
            with open(log, "a") as file:
                file.write("in\n")
            time.sleep(0.001)
            with open(log, "a") as file:
                file.write("out\n")


@pytest.mark.filterwarnings("ignore:another process is writing")
def test_one_process_holds_a_folder_at_a_time_and_no_lock_is_left(tmp_path):
    """The lock is removed by each holder, so those that wait hold a file of which the name may be another's by then."""
    folder, log = tmp_path / "locked" / "folder", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    holders = [context.Process(target=_hold, args=(folder, log)) for _ in range(HOLDERS)]
    for holder in holders:
        holder.start()
    for holder in holders:
        holder.join(timeout=60)
    assert log.read_text().split() == ["in", "out"] * HOLDERS * TIMES
    assert list(folder.parent.iterdir()) == []


def test_the_lock_goes_when_its_holder_fails(tmp_path):
    with pytest.raises(RuntimeError), outputs.in_turn(tmp_path / "folder"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("replace", [lambda path: path.unlink(), lambda path: path.parent.rename(path.parents[1] / "moved")])
def test_a_lock_that_was_taken_away_is_noticed_and_that_of_another_holder_stays(tmp_path, replace):
    path = tmp_path / "run" / ".train.lock"
    with outputs.only_one(path, "training"):
        outputs.check_held(path)
        replace(path)
        with pytest.raises(InputError, match=r"\.train\.lock was moved, removed or replaced during the work there"):
            outputs.check_held(path)
        path.parent.mkdir(exist_ok=True)
        path.write_text("another's")
    assert path.read_text() == "another's"
    outputs.check_held(path)  # held by nobody here


def test_a_file_system_without_locks_is_a_sentence(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(outputs.fcntl, "flock", refuse)
    with pytest.raises(InputError, match="has a file system without locks"), outputs.only_one(tmp_path / ".lock", "training"):
        pass


@pytest.mark.parametrize(
    "write",
    [
        lambda path: outputs.write_json(path, {}),
        outputs.check_writable,
        lambda path: outputs.only_one(path, "training").__enter__(),
        lambda path: outputs.in_turn(Path(path)).__enter__(),
        lambda path: folders.atomic_dir(path).__enter__(),
        lambda path: folders.require_replaceable(Path(path), "token store"),
    ],
)
def test_an_address_makes_no_folder(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    for address in ("gs://bucket/run", Path("s3://bucket/run")):
        with pytest.raises(InputError, match=r"bucket/run is an address; give a path on this machine"):
            write(address)
    monkeypatch.setenv("DE_JAX_CACHE", "gs://bucket/cache")
    with pytest.raises(InputError, match="gs://bucket/cache is an address"):
        outputs.cache_dir()
    assert not list(tmp_path.iterdir())


def test_an_expansion_has_one_writer_at_a_time(tmp_path, monkeypatch):
    """A second one would remove what the first has under temporary names."""
    held = []

    @contextlib.contextmanager
    def in_turn(folder):
        held.append(folder)
        yield

    monkeypatch.setattr(outputs, "in_turn", in_turn)
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d0", "text": "a fox"}\n')
    (tmp_path / "predictions.jsonl").write_text('{"_id": "d0", "queries": ["fox"]}\n')
    written = generated_queries.write_released(
        [tmp_path / "predictions.jsonl"], tmp_path / "corpus.jsonl", tmp_path / "out", about={}
    )
    assert (written, held) == (1, [tmp_path / "out"])


@pytest.mark.parametrize(
    "write",
    [
        lambda path: outputs.write_json(path, {}),
        lambda path: recipe_file.keep_data({"": "hash"}, path.parent),
    ],
)
def test_a_folder_in_the_place_of_a_file_is_refused_and_stays(tmp_path, write):
    (tmp_path / "data.json" / "mine").mkdir(parents=True)
    with pytest.raises(InputError, match=r"data\.json is a folder, and a file is to be written there; move it away\."):
        write(tmp_path / "data.json")
    assert [path.name for path in tmp_path.rglob("*")] == ["data.json", "mine"]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: outputs.write_json(path / "deep" / "report.json", {}),
        lambda path: outputs.check_writable(path / "deep"),
        lambda path: run_log.tensorboard_sink(path, 0),
        lambda path: outputs.in_turn(path / "deep").__enter__(),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_refused_and_stays(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"must be a folder, but .*file is a file; give another path\."):
        write(path)
    assert path.read_text() == "mine"


def test_the_checksum_of_an_absent_file_or_of_a_folder_is_refused(tmp_path):
    for path, why in ((tmp_path / "absent", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=why):
            reading.sha256_of(path)


def test_the_home_directory_is_found_where_no_shell_expands_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert addresses.local("~/run") == tmp_path / "run"
    assert settings._local("~/run", settings.LocalPath) == str(tmp_path / "run")
    parser = command.Parser()
    parser.add_argument("--run_dir")
    assert parser.parse_args(["--run_dir=~/run"]).run_dir == str(tmp_path / "run")
    assert [settings._local(path, settings.LocalPath) for path in ("~run", "a/~/b")] == ["~run", "a/~/b"]


def test_a_name_that_is_not_utf_8_is_refused():
    parser = command.Parser()
    parser.add_argument("--dataset_dir", type=Path)
    for call in (lambda: addresses.local("b\udce9"), lambda: parser.parse_args(["--dataset_dir=b\udce9"])):
        with pytest.raises(InputError, match=r"b\\xe9' is not UTF-8; rename it\."):
            call()


def test_a_user_without_a_home_directory_is_told_how_to_name_a_folder(monkeypatch):
    monkeypatch.delenv("DE_JAX_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    with pytest.raises(InputError, match="no home directory; set DE_JAX_CACHE to a folder"):
        outputs.cache_dir()
