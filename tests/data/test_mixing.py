import numpy as np
import pytest

from de_jax.data.batches.mixing import mixed_epochs
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
    with pytest.raises(InputError, match="mixing rate is 0"):
        mixed_epochs((5, 5), (1, 0), 0)
    with pytest.raises(InputError, match=r"the rate of task 2 of the mixture is a share of 0\.001"):
        mixed_epochs((5, 5), (999, 1), 0)
