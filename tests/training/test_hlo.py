"""FLOPs and collectives read from compiled programs, against what is known of them by hand."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from de_jax.training.mesh import hlo
from de_jax.training.mesh.sharding import make_mesh

ROWS, COLUMNS, DEVICES = 8, 6, 4
WHOLE = ROWS * COLUMNS * 4  # bytes of the array over all devices, float32
SHARE = WHOLE // DEVICES


def costs_of(function, *shapes, num_devices=DEVICES):
    """Of a function under shard_map: its arguments by rows, its result too."""
    mesh = make_mesh(devices=jax.devices()[:num_devices])
    by_rows = PartitionSpec("data")
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, by_rows)) for shape in shapes]
    sharded = jax.shard_map(function, mesh=mesh, in_specs=by_rows, out_specs=by_rows, check_vma=False)
    return hlo.read_costs(jax.jit(sharded).lower(*args).compile().as_text(), num_devices)


COLLECTIVES = {
    "all-gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), (DEVICES - 1) * SHARE),
    "all-reduce": (lambda x: jax.lax.psum(x, "data"), 2 * (DEVICES - 1) * SHARE // DEVICES),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(jnp.tile(x, (DEVICES, 1)), "data", tiled=True),
        (DEVICES - 1) * SHARE,
    ),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(jnp.tile(x, (DEVICES, 1)), "data", 0, 0, tiled=True),
        (DEVICES - 1) * SHARE,
    ),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % DEVICES) for i in range(DEVICES)]), SHARE),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collective_has_the_bytes_that_a_device_receives(kind):
    function, num_bytes = COLLECTIVES[kind]
    found = costs_of(function, (ROWS, COLUMNS)).collectives
    assert [(one.kind, one.num_devices, one.times, one.bytes) for one in found] == [(kind, DEVICES, 1, num_bytes)]


def test_what_is_in_a_loop_counts_as_often_as_it_runs():
    def loop(x):
        def turn(carry, _):
            gathered = jax.lax.all_gather(carry, "data", tiled=True)  # [8, 6]
            return jnp.tanh(carry @ gathered.T @ gathered), None

        return jax.lax.scan(lambda c, _: (jax.lax.scan(turn, c, None, length=3)[0], None), x, None, length=5)[0]

    costs = costs_of(loop, (ROWS, COLUMNS))
    assert [(one.kind, one.times, one.bytes) for one in costs.collectives] == [("all-gather", 15, 15 * (DEVICES - 1) * SHARE)]
    assert costs.flops == 15 * 2 * (2 * (ROWS // DEVICES) * COLUMNS * ROWS)
    assert costs.num_unknown_loops == 0


def test_loop_of_unknown_length_is_counted_once_and_named():
    def until_large(x):
        return jax.lax.while_loop(lambda y: jnp.max(y) < 100.0, lambda y: y @ jnp.ones((COLUMNS, COLUMNS)) + 1.0, x)

    costs = costs_of(until_large, (ROWS, COLUMNS), num_devices=1)
    assert costs.flops == 2 * ROWS * COLUMNS * COLUMNS
    assert costs.num_unknown_loops == 1


def test_products_of_every_form_have_their_flops():
    costs = costs_of(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (2, 3, 5), (2, 7, 5), num_devices=1)
    assert costs.flops == 2 * (2 * 3 * 7) * 5


def test_flops_are_the_compilers_own_which_counts_the_body_of_a_loop_once():
    """Where it fails because XLA counts loops, its figure can take the place of this module's."""

    def product(x, y):
        return jnp.einsum("bij,bkj->bik", x, y)

    def compiled(function):
        return jax.jit(function).lower(*[jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)] * 2).compile()

    once = compiled(product)
    loop = compiled(lambda x, y: jax.lax.scan(lambda carry, _: (product(carry, y), None), x, None, length=7)[0])
    flops = [hlo.read_costs(program.as_text(), 1).flops for program in (once, loop)]
    assert flops == [once.cost_analysis()["flops"], 7 * once.cost_analysis()["flops"]]
    assert loop.cost_analysis()["flops"] < 1.01 * flops[0]


TPU_PROGRAM = """HloModule step, is_scheduled=true

%cond (p.0: (s32[], f32[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %p.0 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(1)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%p.0), index=0
  ROOT %lt = pred[]{:T(512)} compare(%count, %limit), direction=LT, metadata={op_name="while/cond/lt"}
}

%start (p.1: f32[2,4]) -> (f32[2,4], f32[8,4]) {
  %p.1 = f32[2,4]{1,0:T(8,128)} parameter(0)
  %gather.1 = f32[8,4]{1,0} all-gather(%p.1), channel_id=5, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
  ROOT %begun = (f32[2,4]{1,0}, f32[8,4]{1,0:T(8,128)}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p.2: f32[2,4]) -> f32[8,4] {
  %p.2 = f32[2,4]{1,0:T(8,128)} parameter(0)
  %gather.2 = f32[8,4]{1,0} all-gather(%p.2), channel_id=5, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
  ROOT %ended = f32[8,4]{1,0} custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.4 (p.3: f32[8,4]) -> f32[1,4] {
  %p.3 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %sum = f32[8,4]{1,0} all-reduce(%p.3), channel_id=5, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %part = f32[1,4]{1,0} dynamic-slice(%sum), dynamic_slice_sizes={1,4}
}

%scores (p.4: bf16[6,3,7,5], p.5: bf16[6,3,9,5]) -> f32[6,3,7,9] {
  %p.4 = bf16[6,3,7,5]{3,2,1,0} parameter(0)
  %p.5 = bf16[6,3,9,5]{3,2,1,0} parameter(1)
  ROOT %conv = f32[6,3,7,9]{3,2,1,0:T(8,128)} convolution(%p.4, %p.5), WINDOW, dim_labels=01bf_01oi->01bf
}

%body (p.6: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.6 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(1)}) parameter(0)
  %one = bf16[6,3,7,5]{3,2,1,0} custom-call(%p.6), custom_call_target="x"
  %two = bf16[6,3,9,5]{3,2,1,0} custom-call(%p.6), custom_call_target="x"
  %fusion.1 = f32[6,3,7,9]{3,2,1,0} fusion(%one, %two), kind=kOutput, calls=%scores
  %share = f32[2,4]{1,0} custom-call(%p.6), custom_call_target="x"
  %fusion.2 = (f32[2,4]{1,0}, f32[8,4]{1,0}) fusion(%share), kind=kCustom, calls=%start
  %fusion.3 = f32[8,4]{1,0} fusion(%share), kind=kCustom, calls=%done
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%one, %fusion.3)
}

ENTRY %main (p.7: f32[8,4]) -> f32[1,4] {
  %p.7 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %init = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(1)}) tuple(%p.7)
  %loop = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(1)}) while(%init), condition=%cond, body=%body
  %last = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %fusion.4 = f32[1,4]{1,0} fusion(%last), kind=kCustom, calls=%all-reduce-scatter.4
}
""".replace("WINDOW", "window={size=6x3 stride=5x2 lhs_dilate=6x3}")


def test_program_of_a_tpu_is_read():
    costs = hlo.read_costs(TPU_PROGRAM, 8)
    # A batched product is a convolution whose batch dimensions are windows that meet one real value each.
    assert costs.flops == 12 * 2 * (6 * 3) * (7 * 9) * 5
    assert [tuple(one) for one in costs.collectives] == [
        ("all-gather", 4, 12, 12 * 3 * 2 * 4 * 4),  # in pieces beside products, yet once a trip
        ("reduce-scatter", 8, 1, 7 * 4 * 4),
    ]
    assert costs.num_unknown_loops == 0


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
        ("replica_groups={}", 8),
    ],
)
def test_group_is_as_large_as_its_text_says(groups, size):
    assert hlo._group_size(f"channel_id=1, {groups}, dimensions={{0}}", 8) == size


def test_dense_loop_over_positions_agrees_with_the_window_count():
    for size, result, kernel, stride, low, left, right in [(7, 5, 3, 1, 0, 1, 1), (7, 4, 3, 2, 1, 1, 2), (4, 6, 3, 1, 2, 2, 1)]:
        window = {"size": kernel, "stride": stride, "pad": f"{low}_0", "lhs_dilate": left, "rhs_dilate": right}
        real = Counter(i * left for i in range(size))
        by_hand = sum(real[o * stride + k * right - low] for o in range(result) for k in range(kernel))
        assert hlo._window_pairs(size, result, {name: str(value) for name, value in window.items()}) == by_hand
