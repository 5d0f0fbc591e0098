"""Files that are complete or absent, and who may write them."""

import multiprocessing
import time

import pytest

from de_jax.files import outputs

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
