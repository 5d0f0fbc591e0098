"""The same training on any mesh, and where every array of the state lies."""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from de_jax.losses.in_batch import samtone
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.training.optim.optimizer import adafactor, adamw, linear, make_optimizer
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.step.adapters import AdaptedModel, Lora
from de_jax.training.step.as_trained import ChunkedModel
from de_jax.training.step.train_step import init_state, make_train_step
from de_jax.types import Batch, InputError

ENCODER = T5Config(
    vocab_size=64, model_dim=16, num_layers=1, num_heads=4, head_dim=8, mlp_dim=32, dtype="float32", dropout_rate=0.1
)
TOWER = TowerConfig(ENCODER, projection_dim=8)
MODEL = DualEncoder(TOWER, TOWER)
FACTORED = functools.partial(adafactor, min_dim_size_to_factor=8)
# Adam's first steps are as long as its learning rate even where a gradient is rounding: at 1e-3 that stays below 1e-5.
SCHEDULES = {FACTORED: linear(peak=1e-2, num_steps=12), adamw: linear(peak=1e-3, num_steps=12)}
LOSS = functools.partial(samtone, temperature=0.05)
MESHES = [(2, 1, 1), (8, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 1, 2), (1, 1, 4), (2, 2, 1), (4, 2, 1), (2, 1, 2), (2, 2, 2)]


def batch(seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(1, 64, shape).astype(np.int32)  # noqa: E731
    return Batch(draw(16, 6), draw(16, 10), np.arange(16, dtype=np.int32), np.arange(16, dtype=np.int32))


class Training:
    """A few steps of one recipe on one mesh."""

    def __init__(self, sizes, *, optimizer=FACTORED, num_chunks=1, loss=LOSS, rules=None, adapters=None, **options):
        self.mesh = sharding.make_mesh(*sizes)
        tx = functools.partial(make_optimizer, optimizer, SCHEDULES[optimizer], **options)
        adapted = (AdaptedModel(MODEL, adapters), tx, jax.random.key(0), adapters.split) if adapters else ()
        self.init = lambda: init_state(*(adapted or (MODEL, tx, jax.random.key(0))))
        self.abstract = jax.eval_shape(self.init)
        self.shardings = sharding.state_shardings(self.abstract, self.mesh, rules)
        model = ChunkedModel(MODEL, num_chunks) if num_chunks > 1 else MODEL
        model = AdaptedModel(model, adapters) if adapters else model
        self.step = sharding.compiled_step(make_train_step(model, loss, tx(self.abstract.params)), self.shardings, self.mesh)

    def first(self):
        return jax.jit(self.init, out_shardings=self.shardings)()

    def run(self, state, first=0, last=3):
        for number in range(first, last):
            state, _ = self.step(state, sharding.place(batch(number), self.mesh))
        return state

    def like(self):
        return sharding.with_shardings(self.abstract, self.shardings)


training_on = functools.cache(Training)  # a compilation takes seconds


@functools.cache
def on_one_device(**options):
    training = training_on((1, 1, 1), **options)
    return jax.tree.map(np.asarray, training.run(training.first()))


def assert_trains_as_one_device_does(sizes, **options):
    training = training_on(sizes, **options)
    state = training.run(training.first())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, on_one_device(**options).params)
    assert training.step.program._cache_size() == 1
    lies = jax.tree.map(lambda leaf, wanted: leaf.sharding.is_equivalent_to(wanted, leaf.ndim), state, training.shardings)
    assert all(jax.tree.leaves(lies))


STREAMING = functools.partial(LOSS, block_size=4)
VARIANTS = {
    "adamw": {"optimizer": adamw},
    "chunked": {"num_chunks": 2},
    "streaming": {"loss": STREAMING},
    "chunked and streaming": {"num_chunks": 2, "loss": STREAMING},
    "adapters": {"optimizer": adamw, "adapters": Lora(pattern=".*/encoder/.*/kernel", rank=4, dropout=0.1), "num_chunks": 2},
}
CASES = {str(sizes): (sizes, {}) for sizes in MESHES}
CASES |= {f"{sizes} {name}": (sizes, options) for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2)) for name, options in VARIANTS.items()}


@pytest.mark.parametrize(("sizes", "options"), [((2, 2, 2), {})])
@pytest.mark.soak
@pytest.mark.short_soak
def test_any_mesh_trains_as_one_device_does(sizes, options):
    assert_trains_as_one_device_does(sizes, **options)


@pytest.mark.soak
@pytest.mark.parametrize(("sizes", "options"), list(CASES.values()), ids=list(CASES))
def test_every_mesh_trains_as_one_device_does(sizes, options):
    assert_trains_as_one_device_does(sizes, **options)


def specs_of(tree):
    """The axes of every array's dimensions, by path."""
    return {paths.path_of(key): leaf.spec for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_kernels_and_tables_are_split_and_the_rest_lies_everywhere():
    split = {path: spec for path, spec in specs_of(Training((2, 2, 2)).shardings.params).items() if spec != PartitionSpec()}
    layer = "shared/encoder/layers_0"
    assert split == {
        "shared/embedder/embedding": PartitionSpec(("tensor", "fsdp")),
        **{f"{layer}/attention/{name}/kernel": PartitionSpec("fsdp", "tensor") for name in ("query", "key", "value")},
        f"{layer}/attention/out/kernel": PartitionSpec("tensor", "fsdp"),
        **{f"{layer}/mlp/{name}/kernel": PartitionSpec("fsdp", "tensor") for name in ("wi_0", "wi_1")},
        f"{layer}/mlp/wo/kernel": PartitionSpec("tensor", "fsdp"),
        "shared/projection/kernel": PartitionSpec("fsdp"),
    }


@pytest.mark.parametrize("options", [{}, {"frozen": (".*/projection/.*",)}, {"learning_rate_factors": {".*/wo/.*": 2.0}}])
@pytest.mark.parametrize("optimizer", [FACTORED, adamw])
def test_every_array_of_the_optimizer_lies_as_its_parameter_does(optimizer, options):
    training = Training((2, 2, 2), optimizer=optimizer, **options)
    params = {path: leaf.shape for path, leaf in flat(training.abstract.params).items()}
    shapes, specs = flat(training.abstract.opt_state), specs_of(training.shardings.opt_state)
    assert shapes.keys() == specs.keys()
    kinds = set()
    for path, leaf in shapes.items():
        owners = [name for name in params if path.endswith("/" + name)]
        if leaf.shape in ((), (1,)):  # counts, and what an array that is factored, or is not, leaves empty
            assert specs[path] == PartitionSpec(), path
            continue
        (owner,) = owners
        spec, kind = padded(specs_of(training.shardings.params)[owner], len(params[owner])), "moment"
        if leaf.shape != params[owner]:
            kind = re.search("v_row|v_col", path).group()
            # optax (Shazeer and Stern 2018): row means lack the largest dimension, column means the second largest.
            largest, second = np.argsort(params[owner])[::-1][:2]
            spec = tuple(axes for dim, axes in enumerate(spec) if dim != (largest if kind == "v_row" else second))
        assert padded(specs[path], leaf.ndim) == spec, path
        kinds.add(kind)
    assert kinds == ({"moment"} if optimizer is adamw else {"moment", "v_row", "v_col"})


def flat(tree):
    return {paths.path_of(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def padded(spec, num_dims):
    return (*spec, *(None,) * (num_dims - len(spec)))


def test_rules_name_the_last_dimensions_so_that_stacked_layers_are_split_alike():
    mesh = sharding.make_mesh(1, 2, 2)
    shape = jax.ShapeDtypeStruct((3, 16, 32), np.float32)
    state = init_like({"shared": {"encoder": {"layers": {"attention": {"query": {"kernel": shape}}}}}})
    (spec,) = specs_of(sharding.state_shardings(state, mesh).params).values()
    assert spec == PartitionSpec(None, "fsdp", "tensor")


def init_like(params):
    return Training((1, 1, 1)).abstract._replace(params=params, opt_state=())


def test_users_rules_go_before_the_default_ones_and_the_last_counts():
    rules = {".*/wo/kernel": (None, "tensor"), ".*/layers_0/mlp/wo/kernel": ("fsdp", None)}
    specs = specs_of(Training((2, 2, 2), rules=rules).shardings)
    assert specs["params/shared/encoder/layers_0/mlp/wo/kernel"] == PartitionSpec("fsdp")
    assert specs["params/shared/encoder/layers_0/mlp/wi_0/kernel"] == PartitionSpec("fsdp", "tensor")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({".*/wq/kernel": ("fsdp",)}, r"sharding pattern '\.\*/wq/kernel' matches no parameter"),
        ({".*/wo/kernel": ("model",)}, "names the axis 'model'; the axes are 'data', 'fsdp', 'tensor', or None"),
        ({".*/wo/kernel": ("fsdp", "fsdp")}, "names an axis twice"),
        ({".*/wo/kernel": "fsdp"}, "is one name; write a tuple"),
        ({".*/scale": ("fsdp", None)}, "is of 2 dimensions, but 'shared/encoder/encoder_norm/scale' has the shape"),
        ({".*/rel_embedding": (("fsdp", "tensor"), None)}, r"'shared/.*rel_embedding', shape \(4, 32\), into 8 pieces.*divide 4"),
    ],
)
def test_users_rules_that_cannot_be_followed_are_refused(rules, message):
    with pytest.raises(InputError, match=message):
        Training((1, 4, 2), rules=rules)


def test_default_rules_leave_a_dimension_whole_that_its_axes_do_not_divide():
    mesh = sharding.make_mesh(1, 8, 1)
    state = init_like({"shared": {"projection": {"kernel": jax.ShapeDtypeStruct((12, 8), np.float32)}}})
    assert set(specs_of(sharding.state_shardings(state, mesh).params).values()) == {PartitionSpec()}


@pytest.mark.soak
@pytest.mark.short_soak
def test_checkpoint_of_one_mesh_continues_on_another(tmp_path):
    one, eight = training_on((1, 1, 1)), training_on((1, 8, 1))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(2, eight.run(eight.first(), last=2))
    checkpoints.wait()
    continued = one.run(checkpoints.restore(2, one.like()), 2)
    checkpoints.save(3, continued)
    checkpoints.wait()
    mixed = checkpoints.restore(3, Training((2, 2, 2)).like())
    checkpoints.close()
    assert mixed.params["shared"]["embedder"]["embedding"].sharding.spec == PartitionSpec(("tensor", "fsdp"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mixed.params, on_one_device().params)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.soak
@pytest.mark.short_soak
def test_fsdp_moves_kernels_and_not_activations(scan_layers):
    """XLA may as well sum the activations of all rows on every device, which is right and many times as much to move."""
    encoder = T5Config(
        vocab_size=512,
        model_dim=64,
        num_layers=1 + scan_layers,
        num_heads=4,
        head_dim=16,
        mlp_dim=128,
        dtype="float32",
        scan_layers=scan_layers,
    )
    model = DualEncoder(TowerConfig(encoder, projection_dim=64), TowerConfig(encoder, projection_dim=64))
    tx = functools.partial(make_optimizer, adafactor, SCHEDULES[FACTORED])
    abstract = jax.eval_shape(lambda: init_state(model, tx, jax.random.key(0)))
    tokens, ids = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((256, 24), (256,)))
    mesh = sharding.make_mesh(1, 8, 1)
    shardings = sharding.state_shardings(abstract, mesh)
    step = sharding.compiled_step(make_train_step(model, LOSS, tx(abstract.params)), shardings, mesh)
    state = sharding.with_shardings(abstract, shardings)
    text = step.lower(state, Batch(tokens, tokens, ids, ids)).compile().as_text()
    moved = re.findall(r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", text)
    assert any("f32[64,128]" in shape for shape in moved)
    assert not [shape for shape in moved if re.search(r"\[\d\d+,24,\d+\]", shape)]


@pytest.mark.parametrize("same_tower", ["query", "both"])
def test_the_dense_samtone_step_gathers_each_towers_embeddings_and_ids_once(same_tower):
    encoder = T5Config(vocab_size=8, model_dim=8, num_layers=0, num_heads=1, head_dim=8, mlp_dim=8, dtype="float32")
    model, tx, mesh = DualEncoder(*[TowerConfig(encoder, projection_dim=24)] * 2), optax.sgd(0.1), sharding.make_mesh(8)
    abstract = jax.eval_shape(lambda: init_state(model, lambda params: tx, jax.random.key(0)))
    shardings = sharding.state_shardings(abstract, mesh)
    loss = functools.partial(LOSS, same_tower=same_tower)
    step = sharding.compiled_step(make_train_step(model, loss, tx), shardings, mesh)
    tokens, ids = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((64, 4), (64,)))
    text = step.lower(sharding.with_shardings(abstract, shardings), Batch(tokens, tokens, ids, ids)).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]\S* all-gather\(", text)]
    assert sorted(sizes) == [64, 64, 64 * 24, 64 * 24]


def test_mesh_sizes_that_cannot_be_are_refused():
    assert dict(sharding.make_mesh(-1, 2, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(sharding.make_mesh(1, -1).shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    for sizes, message in [
        ((-1, -1, 1), "data=-1, fsdp=-1, tensor=1 cannot be; .* -1 for one axis at most"),
        ((0, 1, 1), "data=0, .* at least 1"),
        ((4, 4, 1), "asks for 16 devices, but there are 8; it is data=4, fsdp=4, tensor=1"),
        ((-1, 3, 1), "the 8 devices cannot be shared out as data=-1, fsdp=3, tensor=1"),
    ]:
        with pytest.raises(InputError, match=message):
            sharding.make_mesh(*sizes)
    with pytest.raises(InputError, match="batch_size 6 is not divisible by the 4 devices of the mesh along data and fsdp; take 4"):
        sharding.check_batch_size(6, sharding.make_mesh(2, 2, 2))


class Device:
    """As much of a device as a mesh needs to know whose it is."""

    def __init__(self, number, per_process):
        self.id, self.process_index, self.device_kind, self.platform = number, number // per_process, "cpu", "cpu"


@pytest.mark.parametrize(
    ("sizes", "per_process", "expected"),
    [
        ((8, 1, 1), 4, [(0, 2), (1, 2)]),
        ((2, 2, 2), 2, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((2, 1, 4), 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((1, 1, 8), 4, [(0, 1), (0, 1)]),
    ],
)
def test_processes_read_the_rows_of_their_devices(sizes, per_process, expected):
    mesh = sharding.make_mesh(*sizes, devices=[Device(number, per_process) for number in range(8)])
    assert [sharding.host_share(mesh, process) for process in range(8 // per_process)] == expected


def test_mesh_that_parts_the_rows_of_a_batch_unevenly_or_leaves_a_process_out_is_refused():
    devices = [Device(number, 3) for number in range(6)]
    with pytest.raises(InputError, match="does not split the rows of a batch evenly"):
        sharding.host_share(sharding.make_mesh(3, 1, 2, devices=devices), 0)
    with pytest.raises(InputError, match="leaves out all devices of a process"):
        sharding.make_mesh(3, devices=devices)
