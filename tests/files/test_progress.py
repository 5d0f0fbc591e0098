"""Progress bars: what a log file keeps of them."""

import time

from de_jax.files.outputs import progress_bar


def test_a_file_gets_the_first_and_the_last_state_of_a_short_bar(capsys):
    with progress_bar(total=100) as bar:
        for _ in range(100):
            time.sleep(0.005)
            bar.update()
    states = capsys.readouterr().err.split("\r")
    assert [state.split("%")[0].strip() for state in states if state] == ["0", "100"]
