"""A step compiled for simulated or remote devices; TPUs where libtpu is installed, simulated devices everywhere."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.configurables import read_recipe
from de_jax.models import layers
from de_jax.models.t5 import T5Config
from de_jax.training.mesh import hlo, plan, sharding
from de_jax.training.mesh.sharding import make_mesh, replicated
from de_jax.training.step.train_step import batch_shapes
from de_jax.types import InputError

TINY = ("vocab_size=64", "model_dim=128", "num_layers=1", "num_heads=2", "head_dim=16", "mlp_dim=64", "dropout_rate=0.0")
SHAPE = {"batch_size": 16, "query_length": 8, "doc_length": 16}


@functools.cache
def step_on(topology_name, *settings):
    """(step, state, mesh, encoder) of a tiny recipe, as training has them."""
    recipe = read_recipe(["recipes/sde.gin"], [*(f"T5Config.{setting}" for setting in TINY), *settings])
    mesh, state = recipe.devices.mesh(devices=plan.open_topology(topology_name).devices), recipe.check()
    shardings = sharding.state_shardings(state, mesh, recipe.devices.sharding_rules)
    step = sharding.compiled_step(recipe.train_step(state.params), shardings, mesh)
    return step, sharding.with_shardings(state, shardings), mesh, recipe.model.query.encoder


@functools.cache
def planned(topology_name, *settings, effort=0.0):
    step, state, mesh, _ = step_on(topology_name, *settings)
    return plan.compile_for(mesh, step, state, batch_shapes(**SHAPE), effort=effort)


@pytest.mark.parametrize("settings", [(), ("make_mesh.fsdp=4",), ("make_mesh.fsdp=2", "make_mesh.tensor=2")])
@pytest.mark.soak
@pytest.mark.short_soak
def test_arguments_are_the_state_and_the_batch_as_they_lie_on_the_mesh(settings):
    memory, (step, state, *_) = planned("cpu:8", *settings).memory, step_on("cpu:8", *settings)
    num_shares = 4 if "make_mesh.tensor=2" in settings else 8
    of_batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch_shapes(**SHAPE))) // num_shares
    # Adafactor keeps an array of one value where a second moment is not factored, and never reads it.
    placeholders = sum(leaf.shape == (1,) for leaf in jax.tree.leaves(state.opt_state))
    of_state = plan.bytes_per_device(state) - 4 * placeholders
    of_numbers = 4 * len(jax.tree.leaves(step.numbers))  # of the schedule, and the temperature
    assert memory.arguments == of_state + of_batch + of_numbers
    assert memory.aliased == of_state  # donated, and back in its own place
    assert memory.total == memory.outputs + of_batch + of_numbers + memory.temporaries


@pytest.mark.soak
@pytest.mark.short_soak
def test_fsdp_splits_what_the_state_takes():
    sizes = [plan.bytes_per_device(step_on("cpu:8", f"make_mesh.fsdp={n}")[1]) for n in (1, 8)]
    assert sizes[1] < 0.2 * sizes[0]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.soak
@pytest.mark.short_soak
def test_executed_flops_are_those_of_the_formula_and_of_the_loss(remat):
    settings = ("make_mesh.fsdp=4", *(["T5Config.remat='full'"] if remat == "full" else []))
    executed = planned("cpu:8", *settings).costs.flops * 8
    encoder, num_pairs = step_on("cpu:8", *settings)[3], SHAPE["batch_size"]
    num_tokens = num_pairs * (SHAPE["query_length"] + SHAPE["doc_length"])
    forward = forward_flops(encoder)
    pooling = 2 * num_tokens * encoder.model_dim  # backward it is a sum
    projection = 3 * 2 * 2 * num_pairs * encoder.model_dim * 768
    both_directions = 2 * 3 * 2 * num_pairs**2 * 768
    # Of a layer that is computed again, all but its last product is read.
    again = forward - 2 * num_tokens * encoder.num_layers * encoder.mlp_dim * encoder.model_dim
    assert executed == 3 * forward + pooling + projection + both_directions + (again if remat == "full" else 0)


def forward_flops(encoder):
    return plan.forward_flops(encoder, np.repeat([SHAPE["query_length"], SHAPE["doc_length"]], SHAPE["batch_size"]))


def test_an_effort_is_a_level_of_the_compiler_that_every_supported_jax_has():
    levels = {effort: plan.compiler_options(effort) for effort in (-1.0, -0.5, 0.0, 0.2, 1.0)}
    assert levels == {-1.0: level("O0"), -0.5: level("O1"), 0.0: None, 0.2: level("O2"), 1.0: level("O3")}


def level(name):
    levels = jax.CompilerEffortLevel if hasattr(jax, "CompilerEffortLevel") else jax._src.config.EffortLevel
    return {"optimization_level": levels[name].value}


def test_useful_flops_are_those_of_the_table_in_the_speed_notes():
    base = T5Config()  # 12 layers of 768, 172 MFLOP a token at length 64 and 179 at 256
    assert plan.forward_flops(base, np.array([64])) / 64 == pytest.approx(172e6, rel=0.01)
    assert plan.forward_flops(base, np.array([256])) / 256 == pytest.approx(179e6, rel=0.01)


@pytest.mark.soak
@pytest.mark.short_soak
def test_one_device_has_no_collectives_and_more_have_an_all_reduce_of_the_gradient():
    assert planned("cpu:1").costs.collectives == ()
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(step_on("cpu:8")[1].params))
    reduced = sum(one.bytes for one in planned("cpu:8").costs.collectives if one.kind == "all-reduce")
    assert reduced >= 2 * gradient * 7 // 8


def test_products_and_collectives_are_estimated_apart():
    chip = plan.CHIPS["v5e"]
    costs = hlo.Costs(int(197e12), (hlo.Collective("all-gather", 4, 1, int(100e9)), hlo.Collective("all-reduce", 4, 1, 100)), 0)
    estimate = plan.estimate(costs, chip)
    assert estimate == pytest.approx((1.0, 0.5))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e", "'v5e' is unknown; give v4, v5e, v5p, v6e and a grid, a100, h100, h200 or cpu and a number, such as v4:4x4x4"),
        ("v9:2x2", "'v9:2x2' is unknown"),
        ("cpu:0", "'cpu:0' is unknown"),
        ("h100:0", "'h100:0' is unknown"),
        ("h100:2x2x2", "'h100:2x2x2' is unknown"),
        ("v5e:2xtwo", "'v5e:2xtwo' is unknown"),
        ("cpu:64", "64 simulated devices are asked for, but JAX has started with 8"),
    ],
)
def test_topology_that_cannot_be_meant_is_refused(topology, message):
    jax.devices()  # before it, JAX would start with as many simulated devices as are asked for
    with pytest.raises(InputError, match=message):
        plan.open_topology(topology)


def test_tpu_without_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(InputError, match=r"for a TPU needs the package libtpu; run pip install 'de-jax-retrieval\[plan\]'"):
        plan.open_topology("v5e:2x2")


def test_gpus_without_the_plugin_say_what_to_install(monkeypatch):
    monkeypatch.setattr(plan, "PLUGINS", ("jax_plugins.xla_cuda99",))
    with pytest.raises(InputError, match=r"needs JAX's CUDA plugin; run pip install 'de-jax-retrieval\[plan_gpu\]'"):
        plan.open_topology("h100:8")


def test_a_program_that_a_device_has_no_room_for_does_not_fit():
    memory = plan.Memory(2 * plan.GIB, 2 * plan.GIB, plan.GIB, plan.GIB, 0)
    assert plan.lacks(memory, plan.Chip(1.0, 1.0, 4 * plan.GIB)) is None
    assert plan.lacks(memory, plan.Chip(1.0, 1.0, 3 * plan.GIB)) == "It takes 4.00 GiB of the 3.00 that a device gives."


@pytest.mark.soak
class TestGPU:
    """With JAX's CUDA plugin alone, no GPU."""

    @pytest.fixture(autouse=True)
    def _plugin(self):
        if not plan.compiles_for_gpus():
            pytest.skip("JAX's CUDA plugin compiles for GPUs")

    def test_name_gives_hosts_and_gpus(self):
        for name, num_gpus, num_hosts in (("a100:4", 4, 1), ("h100:8", 8, 1), ("h200:2x8", 16, 2)):
            topology = plan.open_topology(name)
            assert len(topology.devices) == num_gpus
            assert {device.platform for device in topology.devices} == {"gpu"}
            assert len({device.process_index for device in topology.devices}) == num_hosts
            assert name[:4].upper() in topology.devices[0].device_kind

    def test_step_compiles_with_the_memory_flops_and_collectives_that_it_has_elsewhere(self):
        settings = ("make_mesh.fsdp=4", "T5Config.remat='full'", "T5Config.attention='plain'")
        found = planned("h100:8", *settings, effort=-1.0)
        assert found.memory.aliased == pytest.approx(plan.bytes_per_device(step_on("h100:8", *settings)[1]), rel=0.01)
        assert found.costs.flops == pytest.approx(planned("cpu:8", *settings).costs.flops, rel=0.02)
        assert found.costs.num_unknown_loops == 0
        assert {one.kind for one in found.costs.collectives} >= {"all-gather", "all-reduce"}


class TestTPU:
    """With libtpu alone, no TPU."""

    @pytest.fixture(autouse=True)
    def _libtpu(self):
        pytest.importorskip("libtpu")

    def test_grid_names_its_chips(self):
        for name, num_chips in (("v5e:2x2", 4), ("v5e:16x16", 256), ("v6e:8x8", 64), ("v5p:4x4x4", 64), ("v4:4x4x4", 64)):
            topology = plan.open_topology(name)
            assert len(topology.devices) == num_chips
            assert {device.platform for device in topology.devices} == {"tpu"}

    @pytest.mark.parametrize("name", ["v5e:8x8", "v6e:8x8", "v5p:4x4x4"])
    def test_mesh_may_cut_an_axis_of_the_grid(self, name):
        mesh = make_mesh(fsdp=32, devices=plan.open_topology(name).devices)
        assert dict(mesh.shape) == {"data": 2, "fsdp": 32, "tensor": 1}

    def test_grid_that_no_tpu_has_is_refused(self):
        with pytest.raises(InputError, match=r"topology v5e:3x3 cannot be: .*3x3.* not divisible"):
            plan.open_topology("v5e:3x3")

    @pytest.mark.soak
    def test_step_compiles_with_the_memory_flops_and_collectives_that_it_has_elsewhere(self):
        settings = ("make_mesh.fsdp=4", "T5Config.remat='full'")
        found = planned("v5e:2x4", *settings, effort=-1.0)
        state = step_on("v5e:2x4", *settings)[1]
        # A TPU lays arrays out in tiles of 8 x 128, so that small ones take more than their values.
        beside_values = found.memory.aliased - plan.bytes_per_device(state)
        assert 0 < beside_values < 4 * 8 * 128 * len(jax.tree.leaves(state))
        assert found.attention == ("fused",)
        assert planned("cpu:8", *settings).attention == ("plain",)
        plain = planned("v5e:2x4", *settings, "T5Config.attention='plain'", effort=-1.0)
        assert plain.attention == ("plain",)
        assert plain.costs.flops == pytest.approx(planned("cpu:8", *settings).costs.flops, rel=0.02)
        # The kernel's rows are whole tiles of 16, and it computes scores once more for the gradient.
        assert plain.costs.flops < found.costs.flops < 1.1 * plain.costs.flops
        assert found.costs.num_unknown_loops == 0
        assert {one.kind for one in found.costs.collectives} >= {"all-gather", "all-reduce"}

    def test_what_is_traced_is_told_of_the_tpu(self):
        seen = []

        def function(x):
            seen.append((layers.platform(), layers.stream_dtype(jnp.dtype("bfloat16"))))
            return x

        self.compiled(function, (8,))
        assert seen == [("tpu", jnp.bfloat16)]
        assert layers.platform() == "cpu"

    def test_what_does_not_fit_has_the_compiler_s_words(self):
        found = self.compiled(lambda x: x @ x, (100_000, 100_000))
        assert found.memory is None
        assert found.costs is None
        assert re.fullmatch(r"Ran out of memory.* \(.*G\) exceeds available HBM \(15\.75G\)\.", found.why_not)

    @staticmethod
    def compiled(function, shape):
        mesh = make_mesh(devices=plan.open_topology("v5e:2x2").devices)
        return plan.compile_for(mesh, jax.jit(function), jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated(mesh)))
