import pytest
import toy_run


@pytest.mark.soak
@pytest.mark.short_soak
def test_rates_of_encoding_and_search_give_the_seconds_of_a_refresh(printed):
    sizes = ["--num_docs", 400, "--num_queries", 16, "--dim", 32, "--repeats", 1, "--num_texts", 9, "--num_train_queries", 1000]
    encode, search = printed("mine_throughput", *sizes, "--model", "tiny", "--indexes", "flat")
    assert (encode["setting"], search["setting"], search["k"]) == ("encode", "search", 200)
    assert search["flat"]["recall@200"] == 1
    expected = 400 / encode["passages_per_second"] + 1000 / encode["queries_per_second"]
    expected += search["flat"]["build_seconds"] + 1000 / search["flat"]["queries_per_second"]
    assert search["refresh_seconds"]["flat"] == pytest.approx(expected, abs=0.1)
    assert search["refresh_seconds"].keys() == {"exact", "flat"}


@pytest.mark.soak
def test_a_recipe_is_trained_alone_and_beside_a_miner(printed, tmp_path):
    data = toy_run.write_dataset(tmp_path / "toy")
    settings = {
        **{name: value for name, value in toy_run.SETTINGS.items() if not name.startswith("samtone")},
        "beir_pairs.dataset_dir": data,
        "PairsOptions.tokenizer": data / "spiece.model",
        "PairsOptions.negatives_dir": "{run_dir}/negatives",
        "Recipe.loss": "@ance",
        "HardNegatives.miner": "@Miner()",
        "Miner.last_rank": 20,
        "Optimization.num_steps": 200,  # so that the miner mines a checkpoint before the run ends
        "Logging.save_every_steps": 20,
        "T5Config.dropout_rate": 0.0,
    }
    del settings["Logging.log_every_steps"], settings["Logging.evaluate_every_steps"], settings["PairsOptions.dev_split"]
    gin = ["--gin_file=recipes/sde.gin", *(f"--gin.{name}={value}" for name, value in settings.items())]
    training, beside = printed("mine_throughput", "--num_docs", *gin, f"--out_dir={tmp_path / 'runs'}", "--log_every_steps", 2)
    assert training["seconds_of_mining"]["total"] >= training["seconds_of_mining"]["encode"] > 0
    share = training["seconds_of_mining"]["total"] / (training["seconds_of_mining"]["total"] + 1000 * training["seconds_per_step"])
    assert training["mining_share_by_interval"]["1000"] == pytest.approx(share, abs=1e-3)
    assert beside["num_generations"] >= 1
    assert beside["slowdown"] == pytest.approx(beside["seconds_per_step"]["beside"] / training["seconds_per_step"] - 1, abs=1e-3)
