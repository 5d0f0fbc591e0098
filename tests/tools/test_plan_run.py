"""The command for simulated or remote devices, end to end."""

import json

import pytest

from de_jax import cli
from de_jax.types import InputError

RECIPE = ["--gin_file=recipes/samtone_both.gin", "--gin_file=models/t5_1_1_tiny.gin"]
SIZES = {"vocab_size": 64, "num_layers": 1, "model_dim": 32, "mlp_dim": 32, "dropout_rate": 0.0}
# Dropout and adafactor would be most of what is compiled.
SMALL = ["--gin.Optimization.optimizer=@adamw", *(f"--gin.T5Config.{name}={value}" for name, value in SIZES.items())]


@pytest.mark.soak
@pytest.mark.short_soak
def test_plan_of_simulated_devices_is_one_json_object(capsys):
    shape = ["--batch_size=32", "--query_length=8", "--gin.PairsOptions.max_doc_length=16"]
    cli.call("plan", [*RECIPE, *SMALL, *shape, "--topology=cpu:8", "--gin.make_mesh.fsdp=2", "--gin.Devices.num_chunks=2"])
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"] == {"data": 4, "fsdp": 2, "tensor": 1}
    assert (report["batch_size"], report["query_length"], report["doc_length"]) == (32, 8, 16)
    assert report["fits"] is None  # nobody knows the memory of a simulated device
    assert report["estimate"] is None
    assert report["memory_gib"].keys() == {"arguments", "outputs", "aliased", "temporaries", "program", "total"}
    assert {one["kind"] for one in report["collectives"]} >= {"all-gather", "all-reduce"}
    assert report["executed_flops"] > report["useful_flops"] > 0  # chunks are computed twice


@pytest.mark.soak
def test_packed_texts_are_fewer_rows(capsys):
    shape = ["--batch_size=32", "--query_length=8", "--doc_length=16", "--topology=cpu:2"]
    cli.call("plan", [*RECIPE, *SMALL, *shape])
    cli.call("plan", [*RECIPE, *SMALL, *shape, "--query_rows=8", "--doc_rows=10"])
    padded, packed = map(json.loads, capsys.readouterr().out.splitlines())
    assert packed["executed_flops"] < 0.5 * padded["executed_flops"]
    assert packed["memory_gib"]["temporaries"] <= padded["memory_gib"]["temporaries"]


@pytest.mark.soak
def test_mined_negatives_and_passages_are_planned_with_the_batch(capsys):
    shape = ["--gin_file=recipes/sde.gin", *RECIPE[1:], *SMALL, "--batch_size=16", "--query_length=8", "--doc_length=16"]
    mined = ["--gin.Recipe.loss=@ance", "--gin.PairsOptions.negatives_dir=some", "--gin.PairsOptions.num_neg_docs=3"]
    flops = []
    for more in ([], mined, [*mined, "--gin.PairsOptions.max_passages=2"]):
        cli.call("plan", [*shape, "--topology=cpu:2", *more])
        report = json.loads(capsys.readouterr().out)
        flops.append(report["executed_flops"])
        assert report["executed_flops"] > 0.5 * report["useful_flops"]
    plain, with_negatives, with_passages = flops
    assert 2 < with_negatives / plain < 4  # a query, a document and three more
    assert 1.5 < with_passages / with_negatives < 2


@pytest.mark.soak
def test_plan_for_a_tpu_says_whether_it_fits(capsys):
    pytest.importorskip("libtpu")
    cli.call("plan", [*RECIPE, *SMALL, "--batch_size=32", "--query_length=8", "--doc_length=16", "--topology=v6e:2x2"])
    report = json.loads(capsys.readouterr().out)
    assert (report["fits"], report["device"], report["available_gib"]) == (True, "TPU v6 lite", 31.25)
    assert 0 < report["estimate"]["compute_seconds"] < report["estimate"]["collective_seconds"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=cpu:8", "--batch_size=12"], "batch_size 12 is not divisible by the 8 devices"),
        (["--topology=cpu:8", "--gin.make_mesh.fsdp=3"], "8 devices cannot be shared out as data=-1, fsdp=3"),
        (["--topology=v1:2x2"], "'v1:2x2' is unknown"),
        (["--topology=cpu:8", "--gin.train.nun_steps=3"], r"Recipe has no setting 'nun_steps' \(did you mean num_steps\?\)"),
        (["--topology=cpu:8", "--gin.pair.alpha=0.2"], r"nothing in this recipe reads pair\.alpha"),
        (["--topology=cpu:8", "--doc_rows=12"], "batch_size 12 is not divisible"),
        (["--topology=cpu:8", "--batch_size=0"], "--batch_size is 0; it must be at least 1"),
        (["--topology=cpu:8", "--effort=2"], "--effort is 2; it must be at most 1"),
    ],
)
def test_plan_that_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        cli.call("plan", [*RECIPE, *SMALL, *arguments])


@pytest.mark.soak
def test_a_negative_cache_lies_in_equal_shares_on_the_devices(capsys):
    shape = ["--batch_size=16", "--query_length=8", "--gin.PairsOptions.max_doc_length=16", "--gin.TowerConfig.projection_dim=8"]
    cache = [
        "--gin.HardNegatives.negative_cache=@NegativeCache()",
        "--gin.NegativeCache.capacity=4194304",
        "--gin.NegativeCache.num_negatives=2",
    ]
    cli.call("plan", [*RECIPE, *SMALL, *shape, *cache, "--topology=cpu:2"])
    report = json.loads(capsys.readouterr().out)
    assert report["negative_cache_gib"] == round(4194304 // 2 * 4 * (16 + 8 + 4) / 2**30, 3)
    assert report["memory_gib"]["aliased"] >= report["negative_cache_gib"]  # a step changes it in its place
    with pytest.raises(InputError, match="capacity 4194301 is not divisible by the 2 devices"):
        cli.call("plan", [*RECIPE, *SMALL, *shape, *cache, "--topology=cpu:2", "--gin.NegativeCache.capacity=4194301"])
