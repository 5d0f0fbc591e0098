"""The table of `corpus_costs` beside a calculation by hand."""

import pytest

from benchmarks import corpus_costs
from de_jax.types import InputError


def rows(capsys, *flags):
    corpus_costs.main([*flags])
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]


def test_times_and_sizes_are_those_of_a_calculation_by_hand(capsys):
    cpu, chips = rows(capsys, "--num_docs", "1000000", "--dim=512", "--tokens=100", "--utilization=0.5", "--on", "v5e:2")
    # 1e6 / 176 x 172 / 38.5 s; 500,000 / 125 s; 2.048e9 bytes
    assert cpu == ["1,000,000", "2 CPU cores", "7.05 hours", "1.11 hours", "2 / 1 / 0 / 0", ""]
    # 1e6 x 100 x 172e6 / (2 x 197e12 x .5) s; 123 blocks x 1.024e9 bytes / (2 x .819e12) s is less than 5.12e14 / 1.97e14 s
    assert chips == ["", "2 v5e", "1.46 min", "2.6 s", "", "0.5 GiB"]


def test_a_search_by_few_queries_is_bound_by_its_reads(capsys):
    _, chips = rows(capsys, "--num_docs", "1000000000", "--dim=512", "--num_queries=10", "--on", "v5e:2")
    # 1e9 x 73 x 172e6 / (2 x 197e12 x .4) s; 1.024e12 bytes / (2 x .819e12) s
    assert chips[2:] == ["22.1 hours", "0.63 s", "", "476.8 GiB, more than its 15.8"]


def test_an_unknown_chip_is_refused():
    with pytest.raises(InputError, match="--on 'x:3' is no chip and number, such as v5e:16; chips are v4, v5e, "):
        corpus_costs.main(["--on", "x:3"])
