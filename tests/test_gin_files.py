"""Faults of gin files are one sentence with the file and the line; code from outside the package needs a flag."""

import pytest

from de_jax import configurables
from de_jax.types import InputError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\ninclude 'no.gin'\n", r"own\.gin, line 2: the included file no\.gin does not exist"),
        (b"include '{own}'\n", r"own\.gin includes itself"),
        (b"include '{other}'\n", r"own\.gin includes itself, through own\.gin and other\.gin"),
        (b"a = 1\nb\xff = 2\n", r"own\.gin, line 2: not UTF-8 text"),
        (b"import os\n", r"own\.gin, line 1: imports os, which runs code from outside de_jax; .* add --allow_imports"),
        (b"\nfrom os import path\n", r"own\.gin, line 2: imports os"),
        (b"import json as j\n", r"own\.gin, line 1: imports json"),
        (b"A = 1\nimport \\\n  os\n", r"own\.gin, line 2: imports os"),
        (b"include de_jax\n", r"own\.gin, line 1: "),
        (b"import de_jax.nothing\n", r"own\.gin, line 1: de_jax\.nothing cannot be imported: No module named"),
        (b"A = 1\nB = (3,\n", r"own\.gin, line 3: EOF in multi-line statement"),
        (b"A = 1\nB c\n", r"own\.gin, line 2"),
        (b"A = 1\0\n", r"own\.gin, line 1"),
        (b"A = 1\n\rT5Config.num_layers = 1\n", r"own\.gin, line 2: a carriage return within the line"),
        (b"\nquery/T5Config.num_layers = 'x'\n", r"own\.gin, line 2: query/T5Config\.num_layers is 'x'"),
        (b"T5Config.num_layers = %NONE\n", r"own\.gin, line 1: %NONE stands for nothing; write NONE = and its value"),
        (
            b"A = {'x': 1}\nB = [{'x': {'x': 2}, 'y': 3, 'x': 4}]\n",
            r"own\.gin, line 2: the name 'x' stands twice in one dict",
        ),
        (b"A = %B\nB = %A\n", r"own\.gin, line 1: %B stands for itself|own\.gin, line 1: %A stands for itself"),
        (b"A = {[]: 1}\n", r"own\.gin: the gin settings cannot be used: unhashable"),
    ],
)
def test_a_fault_is_one_sentence(tmp_path, text, message):
    own, other = tmp_path / "own.gin", tmp_path / "other.gin"
    other.write_text(f"include '{own}'\n")
    own.write_bytes(text.replace(b"{own}", str(own).encode()).replace(b"{other}", str(other).encode()))
    with pytest.raises(InputError, match=message) as caught:
        configurables.read([str(own)], [])
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_the_line_ends_of_windows_change_nothing(tmp_path):
    (tmp_path / "own.gin").write_bytes(b"\xef\xbb\xbfA = 1\r\nT5Config.num_layers = %A\r\n")
    found = configurables.read([str(tmp_path / "own.gin")])
    assert {str(setting): str(bound.value) for setting, bound in found.items()} == {"A": "1", "T5Config.num_layers": "%A"}


def test_a_typed_setting_of_a_name_that_a_file_has_too_names_no_file(tmp_path):
    (tmp_path / "own.gin").write_text("T5Config.num_layers = 1\n")
    with pytest.raises(InputError, match=r"^T5Config\.num_layers is 'x'"):
        configurables.read([str(tmp_path / "own.gin")], ["T5Config.num_layers=x"])


def test_a_typed_setting_that_a_nearer_one_hides_is_refused_with_that_one(tmp_path):
    (tmp_path / "own.gin").write_text(
        "include 'recipes/sde.gin'\nbeir_pairs.batch_size = 64\nDualEncoder.shared = ()\nquery/T5Config.num_layers = 1\n"
    )
    (tmp_path / "tiny.gin").write_text("include 'models/t5_1_1_tiny.gin'\n")
    files = [str(tmp_path / "own.gin"), str(tmp_path / "tiny.gin")]
    for typed, nearer in (("PairsOptions.batch_size", "beir_pairs.batch_size"), ("Optimization.num_steps", "train.num_steps")):
        with pytest.raises(InputError, match=rf"^{typed} has no effect, because .*\.gin, line \d+ sets {nearer}; set that instead"):
            configurables.build(files, [f"{typed}=8"])
    configurables.build(files, ["T5Config.num_layers=2"])  # of the document tower
    configurables.build(files, ["PairsOptions.batch_size=8", "train.data=@stored_pairs", "stored_pairs.pairs_dir=x"])


def test_imports_are_allowed_by_a_flag(tmp_path):
    (tmp_path / "own.gin").write_text("import colorsys\nimport de_jax.types\n")
    configurables.read([str(tmp_path / "own.gin")], [], allow_imports=True)


OF_VERSION_0_1_0 = {
    "DualEncoder": "query doc shared initial_temperature",
    "TowerConfig": "encoder pooling projection_dim projection_bias projection_norm normalize projection_init",
    "T5Config": (
        "vocab_size model_dim num_layers num_heads head_dim mlp_dim activation num_buckets max_distance bias_per_layer "
        "dropout_rate dtype remat scan_layers"
    ),
    "BertConfig": (
        "vocab_size model_dim num_layers num_heads mlp_dim max_positions position_offset num_token_types norm_epsilon "
        "dropout_rate dtype remat scan_layers"
    ),
    "pretrained_tower": (
        "source tower normalize layers projection_dim projection_bias projection_init dtype dropout_rate remat scan_layers"
    ),
    "pretrained_tokenizer": "source tower",
    "in_batch_softmax": "temperature directions reduce_directions label_smoothing margin mask_duplicates block_size",
    "samtone": "temperature same_tower directions reduce_directions margin mask_duplicates block_size",
    "pair": "form alpha temperature reduce_directions mask_duplicates block_size",
    "nce": "temperature mask_duplicates block_size",
    "ance": "temperature in_batch mask_duplicates",
    "dance": "dual_weight temperature mask_duplicates",
    "sampled_softmax": "temperature",
    "adafactor": "decay_rate min_dim_size_to_factor multiply_by_parameter_scale weight_decay decayed",
    "adamw": "b1 b2 eps weight_decay decayed",
    "lamb": "b1 b2 eps weight_decay decayed",
    "ance_lamb": "b1 b2 eps weight_decay decayed",
    "linear": "warmup_steps end",
    "cosine": "warmup_steps end",
    "rsqrt": "warmup_steps end",
    "beir_pairs": (
        "dataset_dir tokenizer doc_tokenizer batch_size max_query_length max_doc_length max_passages split dev_split "
        "dev_max_queries dev_max_docs num_for_both expansion curriculum relevance relevance_file max_generated_length seed "
        "unique_in_batch mask_positives pack length_multiple negatives_dir num_neg_docs num_neg_queries cache_dir"
    ),
    "seqio_pairs": (
        "task module module_args split dev_task dev_split use_cached task_cache_dirs batch_size max_query_length max_doc_length "
        "num_neg_docs num_neg_queries dev_max_queries dev_max_docs seed unique_in_batch pack length_multiple negatives_dir "
        "expansion curriculum relevance relevance_file max_generated_length cache_dir"
    ),
    "stored_pairs": (
        "pairs_dir batch_size max_query_length max_doc_length num_neg_docs num_neg_queries dev_max_queries dev_max_docs seed "
        "unique_in_batch pack length_multiple negatives_dir expansion curriculum relevance relevance_file max_generated_length "
        "cache_dir"
    ),
    "Curriculum": "strategy num_steps num_groups k seed",
    "Miner": (
        "num_neg_docs num_neg_queries first_rank last_rank margin max_score_ratio teacher_scores max_teacher_score "
        "max_resemblance index nprobe ef_search faiss_device faiss_gpu_mode faiss_float16 faiss_on_disk seed bm25_negatives_dir "
        "judgements"
    ),
    "NegativeCache": "capacity num_negatives refresh_fraction lru",
    "make_mesh": "data fsdp tensor devices",
    "Alignment": "measure delta patience every_steps",
    "CollapseAlarm": "min_variance min_effective_rank chance_share patience stop",
    "train": (
        "model loss data optimizer schedule mesh sharding_rules num_steps learning_rate num_chunks clip_norm "
        "learning_rate_factors frozen alternate init_from init_new init_layers seed grad_norm_groups log_every_steps "
        "save_every_steps evaluate_every_steps alignment collapse_alarm miner mine_every_steps follow_every_steps "
        "negative_cache keep_checkpoints profile_steps"
    ),
}
"""The settings of a recipe in 0.1.0, by what they are of. Its gin files and commands are read as they are."""


@pytest.mark.parametrize("name", OF_VERSION_0_1_0)
def test_settings_of_version_0_1_0_have_their_names(name):
    assert not set(OF_VERSION_0_1_0[name].split()) - set(configurables.hints_of(configurables.known()[name]))
