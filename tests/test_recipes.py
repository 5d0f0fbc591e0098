"""Every recipe and model file parses, builds and is read to its last binding; a typo is an error."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from often import often
from pretrained_folders import write_encoder

from de_jax import configurables, recipe_checks
from de_jax.configurables import read_recipe
from de_jax.data.sources.options import texts_of_a_pair
from de_jax.interop import any_model
from de_jax.interop.fine_tuning import initial_params
from de_jax.models.tower import PARTS
from de_jax.recipe import HardNegatives
from de_jax.settings import bound
from de_jax.training.mesh import sharding
from de_jax.training.step.train_step import batch_shapes
from de_jax.types import InputError

ROOT = Path(__file__).parent.parent / "gin_configs"
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*.gin"))
MODELS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("models/*.gin"))
SMALL = ["models/t5_1_1_tiny.gin"], ["T5Config.num_layers=0"]
"""Model files and settings by which a recipe is traced in half a second."""

TRACED = ("quickstart", "samtone_both", "pair_stage1", "ance_firstp", "dance", "daft_alternating", "curriculum_mined", "distil")
"""One of each paper, and what differs most from these; the others in the soak."""
BUILT = ("mixture", "sde_msmarco_seqio", "table", "table_mined")
BUILT += ("ade", "ade_spl", "ance_firstp", "curriculum", "daft_no_projection", "daft_stage1", "quickstart", "sde")
"""Those without a method, as test_composition.py builds the others, and each way to share the towers' parts."""
FROM_A_MODEL = {path for path in RECIPES if "--gin.MODEL=" in (ROOT / path).read_text()}
SHARED = dict.fromkeys((Path(path).stem for path in FROM_A_MODEL), PARTS)
SHARED |= {name: ("projection",) for name in SHARED if name.startswith("daft")} | {"daft_no_projection": ()}
SHARED |= {"sde": PARTS, "sde_msmarco_seqio": PARTS, "quickstart": PARTS}
SHARED |= dict.fromkeys(("ade", "ance_openqa", "curriculum", "curriculum_mined", "vanilla"), ())

# Encoder parameters of the published models; the embedding table and the projection are left out.
ENCODER_PARAMETERS = {
    "t5_1_0_small": 18.9e6, "t5_1_0_base": 85.0e6, "t5_1_0_large": 302e6, "t5_1_0_3b": 1208e6, "t5_1_0_11b": 4832e6,
    "t5_1_1_small": 18.9e6, "t5_1_1_base": 85.0e6, "t5_1_1_large": 308e6, "t5_1_1_xl": 1158e6, "t5_1_1_xxl": 4631e6,
    "bert_base": 85.1e6, "roberta_base": 85.1e6, "ance_roberta": 85.1e6, "minilm_l6": 10.65e6, "modernbert_base": 110.3e6,
    "embeddinggemma_300m": 101.5e6, "qwen3_embedding_0_6b": 440e6, "qwen3_embedding_4b": 3.63e9, "qwen3_embedding_8b": 6.95e9,
}  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    write_encoder(folder, "bert")
    return folder


def built_of(recipe, pretrained):
    return read_recipe([recipe, *SMALL[0]], [f"MODEL={pretrained}"] if recipe in FROM_A_MODEL else SMALL[1])


@pytest.mark.parametrize("recipe", often(RECIPES, *(f"recipes/{name}.gin" for name in BUILT)))
def test_recipe_builds_and_nothing_in_it_is_unread(recipe, pretrained):
    built = built_of(recipe, pretrained)
    assert tuple(built.model.shared) == SHARED.get(Path(recipe).stem, ("projection",))


@pytest.mark.parametrize("recipe", often(RECIPES, *(f"recipes/{name}.gin" for name in TRACED)))
def test_a_step_of_a_recipe_can_be_traced(recipe, pretrained):
    built_of(recipe, pretrained).check()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_short_and_begins_with_what_it_is(recipe):
    lines = (ROOT / recipe).read_text().splitlines()
    assert len(lines) <= 30
    comment = "\n".join(line for line in lines if line.startswith("#"))
    assert f"--gin_file={recipe}" in comment or "de-jax quickstart" in comment


def test_recipe_of_a_loss_over_mined_negatives_needs_their_folder(pretrained):
    with pytest.raises(InputError, match="the loss needs mined negatives"):
        read_recipe(["recipes/bm25_neg.gin"], [f"MODEL={pretrained}", "PairsOptions.negatives_dir="]).check()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if "HardNegatives.miner = @Miner()" in (ROOT / name).read_text()])
def test_recipe_that_mines_is_static_without_its_miner(pretrained, recipe):
    settings = [f"MODEL={pretrained}", "HardNegatives.miner=None", "HardNegatives.mine_every_steps=5000"]
    with pytest.warns(UserWarning, match=r"HardNegatives.mine_every_steps = 5000 has no effect without a miner"):
        built = read_recipe([recipe], settings)
    built.check()
    assert built.negatives == HardNegatives()
    with pytest.raises(InputError, match=r"nothing in this recipe reads Miner.last_rank"):
        read_recipe([recipe], [*settings[:2], "Miner.last_rank=100"])


def test_ances_head_on_roberta_is_new_and_scores_by_dot_products(tmp_path):
    write_encoder(tmp_path, "roberta")
    sizes = {"vocab_size": 17, "model_dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48}
    sizes |= {"max_positions": 50, "num_token_types": 2}
    settings = [f"MODEL={tmp_path}", *(f"BertConfig.{name}={size}" for name, size in sizes.items())]
    for recipe in ("rand_neg", "nce_neg", "bm25_neg", "bm25_rand_neg"):
        built = read_recipe([f"recipes/{recipe}.gin", "models/ance_roberta.gin"], settings)
        tower = built.model.doc
        assert (tower.pooling, tower.projection_dim, tower.projection_norm, tower.normalize) == ("first", 768, True, False)
        assert bound(built.loss, "temperature") == 1.0
    fresh = jax.device_put(built.model.init(jax.random.key(0)), sharding.replicated(sharding.make_mesh()))
    with pytest.raises(InputError, match="for example shared/projection/bias"):
        initial_params(built.initialization.init_from, fresh)
    started, there = (
        initial_params(built.initialization.init_from, fresh, new=(".*/projection/.*",))["shared"],
        any_model.read(tmp_path).params,
    )
    np.testing.assert_array_equal(started["projection"]["kernel"], fresh["shared"]["projection"]["kernel"])
    for part in ("embedder", "encoder"):
        jax.tree.map(np.testing.assert_array_equal, started[part], there["shared"][part])


def test_a_student_of_some_layers_may_share_its_towers(pretrained):
    layers = ["pretrained_tower.layers=(1,)", "Initialization.init_layers={'query': (1,), 'doc': (1,)}"]
    lengths = ["PairsOptions.max_query_length=16", "PairsOptions.max_doc_length=16"]
    built = read_recipe(["recipes/distil.gin"], [f"MODEL={pretrained}", *layers, *lengths])
    recipe_checks.check_before_data(built, built.devices.mesh(), built.model.shapes(), is_fresh=True)
    fresh = jax.device_put(built.init().params, sharding.replicated(sharding.make_mesh()))
    start = built.initialization
    student = initial_params(start.init_from, fresh, layers=start.init_layers)["shared"]
    whole = any_model.read(pretrained).params["shared"]
    jax.tree.map(np.testing.assert_array_equal, student["encoder"]["layers_0"], whole["encoder"]["layers_1"])
    jax.tree.map(np.testing.assert_array_equal, student["embedder"], whole["embedder"])
    deeper = read_recipe(["recipes/distil.gin"], [f"MODEL={pretrained}", layers[1], *lengths])
    with pytest.raises(InputError, match="names 1 layers for the query tower, which has 2; name one for each"):
        recipe_checks.check_before_data(deeper, deeper.devices.mesh(), deeper.model.shapes(), is_fresh=True)


UNREAD = r"but Recipe\.loss makes no use of it"


@pytest.mark.parametrize(
    ("recipe", "settings", "sentence"),
    [
        ("distil", ["PairsOptions.teacher_scores="], "kl_distillation needs a teacher's scores, but batches come without"),
        ("distil", ["PairsOptions.negatives_dir="], "kl_distillation compares a document with negatives mined for its query"),
        ("distil", ["combined.weights=(1.0,)"], r"combined\.weights has 1 numbers for 2 losses"),
        (
            "distil",
            ["combined.losses=(@in_batch_softmax, @adamw)"],
            "Recipe.loss is adamw, which cannot be called with embeddings",
        ),
        ("guided", ["PairsOptions.guide_dir="], "guided needs a guide's embeddings of the texts, but batches come without"),
        ("guided", ["guided.loss=@margin_mse"], r"guided\.loss is margin_mse, which masks no negatives"),
        (
            "guided",
            ["HardNegatives.negative_cache=@NegativeCache()"],
            r"guided has no embeddings of the draws of HardNegatives\.negative_cache",
        ),
        ("distil", ["Recipe.loss=@in_batch_softmax"], rf"PairsOptions\.teacher_scores is '.*', {UNREAD}; leave it out"),
        ("guided", ["Recipe.loss=@in_batch_softmax"], rf"PairsOptions\.guide_dir is '.*', {UNREAD}; leave it out, or put guided"),
        ("dance", ["Recipe.loss=@in_batch_softmax"], rf"PairsOptions\.num_neg_queries is 1, {UNREAD}; set it to 0, or put dance"),
        ("ance_firstp", ["PairsOptions.num_neg_queries=2"], rf"PairsOptions\.num_neg_queries is 2, {UNREAD}; set it to 0"),
        ("ance_firstp", ["Recipe.loss=@nce"], rf"PairsOptions\.num_neg_docs is 1, {UNREAD}; set it to 0, or put in_batch_softmax"),
        ("matryoshka", ["matryoshka.dims=(64, 32)"], r"matryoshka\.dims has 64, but embeddings have 32 dimensions"),
        ("matryoshka", ["pretrained_tower.normalize=True", "matryoshka.normalize=False"], "the towers have normalize = True"),
    ],
)
def test_what_a_teacher_a_guide_or_a_cut_lacks_is_said_before_anything_is_read(pretrained, recipe, settings, sentence):
    with pytest.raises(InputError, match=sentence):
        read_recipe([f"recipes/{recipe}.gin"], [f"MODEL={pretrained}", *settings]).check()


def test_a_cut_is_normalised_as_the_towers_are(pretrained):
    settings = [f"MODEL={pretrained}", "pretrained_tower.normalize=False"]
    with pytest.raises(InputError, match=r"matryoshka\.normalize is True, but the towers have normalize = False"):
        read_recipe(["recipes/matryoshka.gin"], settings)
    read_recipe(["recipes/matryoshka.gin"], [*settings, "matryoshka.normalize=False"]).check()


def test_a_step_of_distillation_is_planned_with_its_scores(pretrained):
    built = read_recipe(["recipes/distil.gin"], [f"MODEL={pretrained}"])
    batch = batch_shapes(8, 4, 4, **texts_of_a_pair(built.options))
    assert (batch.scores.shape, batch.scores.dtype) == ((8, 8), np.float32)
    assert built.memory_settings(8)["in_batch_softmax.block_size"] is None


def test_a_stage_may_normalise_what_it_starts_from(pretrained):
    settings = [f"MODEL={pretrained}", "PairsOptions.negatives_dir=some"]
    for value in (True, False):
        built = read_recipe(["recipes/bm25_neg.gin"], [*settings, f"pretrained_tower.normalize={value}"])
        assert (built.model.query.normalize, built.model.doc.normalize) == (value, value)


def test_stages_mine_what_their_losses_need(pretrained):
    for stage, temperature, num_queries in (
        ("ance_firstp", 0.05, 0),
        ("dance_norm", 0.01, 0),
        ("dance_dual", 1.0, 20),
        ("dance", 0.01, 20),
    ):
        built = read_recipe([f"recipes/{stage}.gin"], [f"MODEL={pretrained}"])
        assert bound(built.loss, "temperature") == temperature
        assert (built.negatives.miner.num_neg_docs, built.negatives.miner.num_neg_queries, built.negatives.miner.last_rank) == (
            20,
            num_queries,
            200,
        )
    maxp = read_recipe(["recipes/ance_maxp.gin"], [f"MODEL={pretrained}"])
    assert maxp.options.max_passages == 4
    maxp.check()


@pytest.mark.parametrize("model", MODELS)
def test_model_file_gives_the_published_size(model):
    encoder = re.search(r"\w+Config(?=\.num_layers)", (ROOT / model).read_text())
    quick_to_trace = [f"{encoder[0]}.scan_layers=True"] if encoder else []
    shapes = read_recipe(["recipes/sde.gin", model], quick_to_trace).model.shapes()
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes["shared"]["encoder"]))
    assert count == pytest.approx(ENCODER_PARAMETERS.get(Path(model).stem, count), rel=0.01)
    if Path(model).stem not in ENCODER_PARAMETERS:
        assert "tiny" in model


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.batch_size=8", "Recipe has no setting 'batch_size'; set PairsOptions.batch_size."),
        ("train.nun_steps=3", "Recipe has no setting 'nun_steps' .did you mean num_steps"),
        ("samton.temperature=1.0", "recipes have no setting called 'samton' .did you mean samtone"),
        ("Recipe.loss=@samton", "Recipe.loss is @samton, but recipes have no setting called 'samton' .did you mean samtone"),
        ("pair.alpha=0.2", r"nothing in this recipe reads .*pair\.alpha"),
        ("make_mesh.model=3", "make_mesh has no setting 'model'; its settings are data, fsdp, tensor, devices."),
        (
            "Optimization.num_steps=%gin.REQUIRED",
            r"Optimization.num_steps is required; .* with --gin.Optimization.num_steps=<value>",
        ),
        ("doc/T5Config.num_layer=2", "T5Config has no setting 'num_layer' .did you mean num_layers"),
        ("documents/T5Config.num_layers=2", r"nothing in this recipe reads .*documents/T5Config\.num_layers"),
        ("samtone.same_tower=both towers", "samtone.same_tower is 'both towers'; it must be 'query', 'doc' or 'both'"),
        ("Recipe.loss=@samtone()", "the recipe cannot be used"),
        ("Recipe.model=3", "model"),
        ("Optimization.num_steps", "has no value"),
        ("linear.warmup_steps=30000", "the run has 20000 steps"),
        ('Optimization.frozen=["docs/.*"]', "freeze pattern 'docs/.*' matches no parameter"),
        ('DualEncoder.shared=("head",)', r"DualEncoder.shared\[0\] is 'head'; it must be 'embedder', 'encoder' or 'projection'"),
        ("MACRO=3", "nothing in this recipe reads .*MACRO"),
    ],
)
def test_setting_that_cannot_be_meant_is_refused(setting, message):
    with pytest.raises(InputError, match=message):
        read_recipe(["recipes/samtone_query.gin", *SMALL[0]], [*SMALL[1], setting]).check()


def test_model_file_replaces_the_model_of_a_recipe_but_not_what_is_typed():
    files = ["recipes/sde.gin", "models/bert_base.gin"]
    assert type(read_recipe(files).model.query.encoder).__name__ == "BertConfig"
    with pytest.raises(InputError, match=r"nothing in this recipe reads T5Config\.num_layers"):
        read_recipe(files, ["T5Config.num_layers=2"])


def test_setting_of_one_tower_leaves_the_other():
    model = read_recipe(["recipes/ade_spl.gin"], ["query/T5Config.num_layers=3"]).model
    assert (model.query.encoder.num_layers, model.doc.encoder.num_layers) == (3, 12)


def test_unknown_recipe_names_those_there_are():
    with pytest.raises(InputError, match=r"recipes/nothing.gin does not exist.*; the recipes are in .*recipes"):
        read_recipe(["recipes/nothing.gin"])


def test_value_that_is_no_literal_is_a_string():
    assert read_recipe(["recipes/sde.gin"], ["Initialization.init_from=runs/other"]).initialization.init_from == "runs/other"


def test_a_loss_of_a_notebook_is_selected_by_name_and_can_be_written_again():
    read_recipe(["recipes/sde.gin"])  # a recipe was read before

    def losses():
        def own(e, *, margin=0.5):
            return e, margin

        return own

    for own in (losses(), losses()):
        configurables.register(("own", own))
        recipe = read_recipe(["recipes/sde.gin"], ["Recipe.loss=@own", "own.margin=2.0"])
        assert recipe.loss("embeddings") == ("embeddings", 2.0)
        assert recipe.loss.func is own
