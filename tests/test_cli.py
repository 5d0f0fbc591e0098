"""`de-jax` as a user meets it: the help of every verb, and the same commands by `python -m`."""

import re
import subprocess
import sys

import pytest

from de_jax import cli


def printed(monkeypatch, capsys, *arguments):
    """(exit status, stdout, stderr) of `de-jax` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["de-jax", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_shows_an_example_that_an_installation_can_run(verb, monkeypatch, capsys):
    code, out, _ = printed(monkeypatch, capsys, verb, "--help")
    assert code == 0
    assert re.search(rf"^ *(\w+=\w+ )?de-jax {verb} +\S", out, re.MULTILINE), out
    assert "python -m" not in out


def test_help_lists_every_verb(monkeypatch, capsys):
    code, out, _ = printed(monkeypatch, capsys, "--help")
    assert not code
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(cli.VERBS)
    assert re.findall(r"^(?!usage)\S.*$", out, re.MULTILINE) == list(cli.GROUPS)


def test_an_unknown_verb_is_refused_with_the_list(monkeypatch, capsys):
    code, out, err = printed(monkeypatch, capsys, "serach")
    assert (code, out) == (2, "")
    assert "  search " in err
    assert err.endswith("'serach' is not a verb of de-jax (did you mean 'search'?).\n")


@pytest.mark.parametrize("module", ["de_jax", "de_jax.cli"])
def test_python_m_is_the_same_command(module):
    done = subprocess.run([sys.executable, "-m", module, "serach"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "'serach' is not a verb of de-jax (did you mean 'search'?).")
