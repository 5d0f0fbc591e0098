import itertools

import numpy as np
import pytest

from de_jax.data.batches.mixing import mixed_epochs, num_distinct, require_distinct, shares_of, turns
from de_jax.data.batches.pair_batches import EpochPlan
from de_jax.types import InputError


@pytest.mark.parametrize(
    ("sizes", "rates"), [((10, 30), (1, 1)), ((7, 50, 3), (0.5, 0.25, 0.25)), ((100,), (3.0,)), ((5, 500), (1, 9))]
)
def test_every_epoch_holds_each_task_by_its_rate(sizes, rates):
    epoch, total = mixed_epochs(sizes, rates, seed=0), sum(sizes)
    bounds = np.cumsum([0, *sizes])
    for number in (0, 1, 7):
        rows = epoch(number)
        assert len(rows) == total
        counts = np.histogram(rows, bounds)[0]
        np.testing.assert_allclose(counts, np.array(rates) / sum(rates) * total, atol=1)


def test_a_task_is_passed_through_before_any_of_its_pairs_comes_again():
    epoch = mixed_epochs((8, 40), (1, 1), seed=4)
    rows = np.concatenate([epoch(number) for number in range(5)])  # 24 of either task in an epoch
    for first, size in ((0, 8), (8, 40)):
        counts = np.bincount(rows, minlength=48)[first : first + size]
        assert counts.sum() == 120
        assert counts.max() - counts.min() <= 1


def test_epochs_do_not_depend_on_those_before_and_differ_by_number_and_seed():
    np.testing.assert_array_equal(
        mixed_epochs((9, 5), (1, 2), 3)(6), [mixed_epochs((9, 5), (1, 2), 3)(number) for number in range(7)][6]
    )
    first = mixed_epochs((9, 5), (1, 2), 3)(0)
    assert first.tolist() != mixed_epochs((9, 5), (1, 2), 3)(1).tolist()
    assert first.tolist() != mixed_epochs((9, 5), (1, 2), 4)(0).tolist()


def test_tasks_are_mixed_and_not_one_after_another():
    rows = mixed_epochs((500, 500), (1, 1), 0)(0)
    assert 200 < np.count_nonzero(rows[:500] < 500) < 300


def test_rates_that_draw_nothing_are_refused():
    with pytest.raises(InputError, match="the rate of task 2 of the mixture is a share of 0,"):
        mixed_epochs((5, 5), (1, 0), 0)
    with pytest.raises(InputError, match=r"the rate of task 2 of the mixture is a share of 0\.001"):
        mixed_epochs((5, 5), (999, 1), 0)


def test_a_share_that_batches_without_repetitions_cannot_hold_is_refused():
    pairs = np.array([[0, 0], [1, 0], [2, 1], [3, 2]])
    assert num_distinct(pairs) == 3
    require_distinct(["a", "b"], [3, 100], (1e308, 1e308), 6)
    for number, batch_size in itertools.combinations(range(1, 60), 2):
        require_distinct(["a", "b"], [number, 100], (number, batch_size - number), batch_size)
    with pytest.raises(InputError, match=r"a has the share 0\.5 of batches of 8 pairs, which is more than the 3 .* at most 0\.375"):
        require_distinct(["a", "b"], [3, 100], (1, 1), 8)


def test_batches_hold_the_shares_that_are_not_refused():
    sizes, rates, batch_size = (60, 600), (1, 1), 64
    pairs = np.repeat(np.arange(660)[:, None], 2, axis=1)
    plan = EpochPlan(pairs, batch_size, 0, True, mixed_epochs(sizes, rates, 0))
    rows = np.concatenate([plan.epoch(number).reshape(-1) for number in range(10)])
    assert np.mean(rows < 60) == pytest.approx(0.5, abs=0.02)


def test_a_temperature_that_leaves_a_source_no_share_is_refused():
    with pytest.raises(InputError, match="temperature is 1e-09, which leaves the smaller sources no share"):
        shares_of([80, 4], 1e-9)


def test_huge_rates_are_shares_too():
    assert len(mixed_epochs((5, 5), (1e308, 1e308), 0)(0)) == 10
    np.testing.assert_allclose(np.bincount(turns([1e308, 1e308], seed=0)(np.arange(1000))), 500, atol=5)


def test_a_task_may_bring_the_order_of_its_passes():
    order = lambda number: np.full(4, -1 - number)  # noqa: E731  # rows that say which pass they are of
    epoch = mixed_epochs((4, 8), (1, 1), 0, [order, None])
    rows = np.concatenate([epoch(number) for number in range(4)])
    np.testing.assert_array_equal(np.sort(rows[rows < 0]), np.repeat(np.arange(-6, 0), 4))


def test_shares_are_the_sizes_to_the_power_of_one_over_the_temperature():
    sizes = (100, 400, 10_000_000)
    for temperature in (0.5, 1.0, 2.0, 1e6):
        powers = [size ** (1 / temperature) for size in sizes]
        np.testing.assert_allclose(shares_of(sizes, temperature), [power / sum(powers) for power in powers], rtol=1e-9)
    assert shares_of((1, 10**12), 0.05)[0] > 0  # no overflow


@pytest.mark.parametrize("rates", [(1, 1), (1, 2, 4), (0.9, 0.0999, 0.0001), tuple(range(1, 12))])
@pytest.mark.parametrize("seed", [0, 7])
def test_sources_have_their_shares_after_any_number_of_steps(rates, seed):
    steps = np.arange(100_000)
    sources, shares = turns(rates, seed)(steps), np.array(rates) / sum(rates)
    for every, most in ((1, 4.0), (2, 6.0), (3, 7.0)):  # every second or third step too, as an alternating optimizer takes them
        for chosen in (sources[first::every] for first in range(every)):
            for source, share in enumerate(shares):
                counts = np.cumsum(chosen == source)
                assert np.abs(counts - share * np.arange(1, len(chosen) + 1)).max() < most


def test_turns_depend_on_the_step_and_the_seed_alone():
    whole = turns((3, 1, 2), 5)(np.arange(1000))
    np.testing.assert_array_equal(turns((3, 1, 2), 5)(np.arange(400, 1000)), whole[400:])
    assert whole.tolist() != turns((3, 1, 2), 6)(np.arange(1000)).tolist()
    np.testing.assert_array_equal(turns((6, 2, 4), 5)(np.arange(1000)), whole)
