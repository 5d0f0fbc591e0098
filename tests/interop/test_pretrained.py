import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.interop.pretrained import Origin, assemble, disassemble
from de_jax.types import InputError

PARAMS = {"shared": {"encoder": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "scale": np.ones(2, np.float32)}}}
ORIGINS = {"shared/encoder/kernel": Origin("linear.weight", transposed=True), "shared/encoder/scale": Origin("norm.weight")}


def stored(**changed):
    arrays = {"linear.weight": PARAMS["shared"]["encoder"]["kernel"].T, "norm.weight": np.ones(2, np.float32)}
    arrays |= {name.replace("_", "."): array for name, array in changed.items()}
    return {name: lambda array=array: array for name, array in arrays.items() if array is not None}


def read(arrays, **options):
    return assemble("model", arrays, ORIGINS, PARAMS, **options)


def test_what_is_disassembled_is_assembled_again_to_the_last_bit():
    arrays = disassemble(PARAMS, ORIGINS)
    assert arrays["linear.weight"].shape == (3, 2)
    again = read({name: lambda array=array: array for name, array in arrays.items()})
    np.testing.assert_array_equal(again["shared"]["encoder"]["kernel"], PARAMS["shared"]["encoder"]["kernel"])


def test_padding_row_changes_places_with_the_first_in_both_directions():
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    params, origins = {"embedding": table[[2, 1, 0, 3]]}, {"embedding": Origin("word", swapped_row=2)}
    arrays = disassemble(params, origins)
    np.testing.assert_array_equal(arrays["word"], table)
    np.testing.assert_array_equal(assemble("model", {"word": lambda: table}, origins, params)["embedding"], params["embedding"])
    with pytest.raises(InputError, match=r"word gives \(\) in the place of \(4, 2\)"):
        assemble("model", {"word": lambda: table[0, 0]}, origins, params)


def test_low_precision_becomes_float32():
    assert read(stored(norm_weight=jnp.ones(2, jnp.bfloat16)))["shared"]["encoder"]["scale"].dtype == np.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_weight": None}, "model lacks 1 arrays that the model needs: norm.weight"),
        (
            {"head_bias": np.ones(2)},
            "no place for: head.bias; if they are not wanted, name them with de-jax import model --ignored",
        ),
        ({"norm_weight": np.ones(3, np.float32)}, r"norm.weight gives \(3,\) in the place of \(2,\)"),
        ({"norm_weight": np.ones(2, np.int64)}, "norm.weight holds int64 values"),
        ({"norm_weight": np.array([1, np.nan], np.float32)}, "norm.weight holds values that are not finite"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    with pytest.raises(InputError, match=message):
        read(stored(**changed))


def test_ignored_arrays_are_left_out_and_a_pattern_without_one_is_refused():
    read(stored(head_bias=np.ones(2)), ignored=[r"head\..*"])
    with pytest.raises(InputError, match="matches no array of model"):
        read(stored(), ignored=[r"head\..*"])
