"""A registered design is run as it says, once: choices on dev, test splits last, and nothing twice."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from often import often
from pretrained_folders import write_encoder

from de_jax import configurables
from de_jax.data.text import beir
from de_jax.types import InputError
from experiments import processes, run_design
from reproduction import designs, tables
from reproduction.yaml_files import read_yaml

ROOT = Path(run_design.__file__).parent
DESIGNS = ["samtone", "samtone_duplicates", "ance", "dance", "daft", "curriculum"]

SMALL = """
question: which?
success: better
cost: none
prepare:
  start: train --run_dir=$out/start
  negatives: mine pairs --dataset_dir=$dataset_dir --negatives_dir=$out/$set
  own: experiments.own --out_dir=$out/own
sets:
  one: {dataset_dir: $data/one, settings: {beir_pairs.split: half}}
  two: {dataset_dir: $data/two, elsewhere: [$data/one]}
grid: {rate: [1e-4, 0.001]}
choose: {set: two, split: dev, seed: 9, measure: ndcg@10}
seeds: [0, 1]
start: $out/start
settings: {Optimization.learning_rate: $rate, Initialization.seed: $seed, Optimization.frozen: [a, b]}
factors: {samtone: {Recipe.loss: "@samtone", samtone.temperature: $temperature}}
arms:
  plain: {stages: [{recipe: recipes/a.gin}], then: [mine pairs --negatives_dir=$run_dir/mined --seed=$seed]}
  both:
    start: plain
    grid: {rate: [3.0], temperature: [0.05]}
    stages: [{recipe: recipes/b.gin, settings: {PairsOptions.negatives_dir: $start/mined}}, {recipe: recipes/c.gin, use: [samtone]}]
measure: RR@10
compare: [{beside: plain, arms: [both]}]
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """What was run; a run at the rate .001 scores best."""
    done = []

    def run(arguments):
        done.append(list(map(str, arguments)))
        flags = dict(one.removeprefix("--").split("=", 1) for one in done[-1] if one.startswith("--") and "=" in one)
        if arguments[:2] == ["de_jax", "train"]:
            Path(flags["run_dir"]).mkdir(parents=True, exist_ok=True)
            lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "dev/ndcg@10": 0.1}]
            (Path(flags["run_dir"]) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            return {"seconds": 1.0}
        if arguments[1:3] == ["evaluate", "beir"]:
            score = 0.7 if "-0.001-" in flags["run_dir"] else 0.6
            return {"dense": {"ndcg@10": score}, "evaluation_dir": f"{flags['run_dir']}/{flags['split']}"}
        return {"systems": {}}

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(
        run_design, "kept_ranking", lambda folder: {"q": {"e": 2.0, "d": 1.0} if "both" in str(folder) else {"d": 1.0}}
    )
    for name in ("one", "two"):
        beir.write(tmp_path / "data" / name, [("d", "", "x")], [("q", "x")], {"test": {"q": {"d": 1}}})
    (tmp_path / "small.yaml").write_text(SMALL)
    return done


def run(tmp_path, *more):
    run_design.main(
        [f"--design={tmp_path / 'small.yaml'}", f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", *more]
    )


def test_a_design_is_run_from_start_to_test_and_then_no_more(tmp_path, commands, capsys):
    run(tmp_path)
    report = json.loads(capsys.readouterr().out)
    out, data = tmp_path / "out", tmp_path / "data"
    assert report["chosen"] == {"plain": {"rate": "0.001"}, "both": {"rate": "3.0", "temperature": "0.05"}}
    assert [line[1] for line in commands[:4]] == ["train", "mine", "mine", f"--out_dir={out / 'own'}"]
    assert commands[2][-1] == f"--negatives_dir={out / 'two'}"
    assert commands[3][0] == "experiments.own"
    trained = [line for line in commands[4:] if line[1] == "train"]
    assert len(trained) == 2 + 2 * 2 * (1 + 2)
    last = trained[-1]
    assert last[2:4] == ["--gin_file=recipes/c.gin", f"--run_dir={out / 'runs' / 'two-both-3.0-0.05-1'}"]
    expected = {
        "Optimization.learning_rate=3.0",
        "Initialization.seed=1",
        "Optimization.frozen=('a', 'b')",
        "samtone.temperature=0.05",
        "Recipe.loss=@samtone",
    }
    assert {one.removeprefix("--gin.") for one in last[4:]} == expected | {f"MODEL={out / 'runs' / 'two-both-3.0-0.05-1-stage1'}"}
    start = out / "runs" / "two-plain-0.001-1"
    assert {f"--gin.MODEL={start}", f"--gin.PairsOptions.negatives_dir={start}/mined"} <= set(trained[-2])
    assert commands.count(["de_jax", "mine", "pairs", f"--negatives_dir={start}/mined", "--seed=1"]) == 1
    assert "--gin.beir_pairs.split=half" in trained[3]
    tests = [number for number, line in enumerate(commands) if "--split=test" in line]
    assert min(tests) > max(number for number, line in enumerate(commands) if line[1] == "train")
    assert len(tests) == 2 * 2 * 3
    assert list(report["sets"]) == ["one", "two", "two, scored on one"]
    both = {"scores": [{"ndcg@10": 0.6}] * 2, "mean": {"ndcg@10": 0.6}, "loss": [2.0] * 2, "collapsed": [None] * 2}
    assert report["sets"]["two"]["arms"]["both"] == both
    compared = [line for line in commands if line[1:3] == ["compare", "runs"]]
    assert compared[1][3:6] == [f"--qrels={data / 'two' / 'qrels' / 'test.tsv'}", "--measure=RR@10", "--systems"]
    assert compared[1][6] == "plain=" + ",".join(f"{out / 'runs' / f'two-plain-0.001-{seed}'}/test" for seed in (0, 1))
    with np.load(out / "scores" / "two-one.npz") as scores:
        assert {name: scores[name].tolist() for name in scores} == {"query_ids": ["q"], "plain": [[1], [1]], "both": [[0.5], [0.5]]}
    done = len(commands)
    run(tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    assert len(commands) == done
    with pytest.raises(InputError, match="was begun with another design, other settings or other data"):
        run(tmp_path, "--settings", "Optimization.num_steps=1")
    run(tmp_path, "--dry_run")
    assert json.loads(capsys.readouterr().out) == {"num_runs": 10, "trained": 10}


def test_without_a_start_an_arm_begins_with_random_parameters(tmp_path, commands):
    text = SMALL.replace("start: $out/start\n", "")
    (tmp_path / "small.yaml").write_text(text)
    experiment = run_design.Experiment(run_design.read(tmp_path / "small.yaml"), tmp_path / "data", tmp_path / "out")
    ((_, _, settings),) = experiment.stages(run_design.Cell("one", "plain", ("1e-4",), "0"))
    assert "MODEL" not in settings


def test_a_command_in_this_process_gives_its_json_object_and_is_printed(tmp_path, capsys):
    beir.write(tmp_path / "all", [("d", "", "x"), ("e", "", "y")], [("q", "x")], {"test": {"q": {"d": 1}}})
    line = ["experiments.sample_corpus", f"--dataset_dir={tmp_path / 'all'}", f"--out_dir={tmp_path / 'part'}", "--num_docs=1"]
    assert processes.run_here(line)["num_docs"] == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "-m experiments.sample_corpus" in told.err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("use: [samtone]", "use: [pair]"), "use has 'pair', but there are samtone"),
        (("arms: [both]", "arms: [neither]"), "compare has 'neither', but there are plain, both"),
        (("set: two", "set: three"), "choose has 'three', but there are one, two"),
        (("elsewhere: [$data/one]", "elsewhere: [$data/more/two]"), "the set two is scored on two folders of one name, two, two"),
        (("start: plain", "start: both"), "both starts from both, which must stand before it"),
        (("success: better", "succes: better"), "success is absent"),
        (("seeds: [0, 1]", "seeds: []"), "seeds is .*, expected a list of 1 or more"),
    ],
)
def test_a_design_that_cannot_be_run_is_refused(tmp_path, change, sentence):
    (tmp_path / "small.yaml").write_text(SMALL.replace(*change))
    with pytest.raises(InputError, match=sentence):
        run_design.read(tmp_path / "small.yaml")


def recipes_of(name, model):
    """The recipe and the settings of every stage of a design, as it would train one cell of each arm from another model."""
    design = run_design.read(ROOT / f"{name}.yaml")
    experiment = run_design.Experiment(design, Path("data"), Path("out"))
    for arm, own in design["arms"].items():
        grid = {**design["grid"], **own["grid"]}
        experiment.chosen[arm] = {key: values[0] for key, values in grid.items()}
        cell = run_design.Cell(next(iter(design["sets"])), arm, tuple(experiment.chosen[arm].values()), "0")
        for recipe, _, settings in experiment.stages(cell):
            models = {key: model for key in ("MODEL", "QUERY_MODEL") if key in settings}
            yield recipe, [f"{key}={value}" for key, value in (settings | models).items()]


@pytest.mark.parametrize("name", DESIGNS)
def test_registered_designs_fill_every_name(name):
    filled = list(recipes_of(name, "a model"))
    assert filled
    assert "$" not in repr(filled)


@pytest.mark.soak
@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.filterwarnings("ignore:.*holds an encoder alone")
def test_registered_designs_set_what_their_recipes_read(name, tmp_path):
    write_encoder(tmp_path, "bert" if name == "daft" else "t5")
    for recipe, settings in recipes_of(name, tmp_path):
        configurables.build([recipe], settings)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_design_needs_the_reports_of_the_designs_in_whose_folders_it_reads(path):
    used = set(re.findall(r"\$out/\.\./(\w+)", path.read_text()))
    needs = {need for need in read_yaml(path).get("needs", []) if need.startswith("runs/")}
    assert needs == {f"runs/designs/{name}/report.json" for name in used}


@pytest.mark.parametrize("paper", tables.names())
def test_the_designs_of_a_paper_can_run_in_order_in_a_fresh_clone(paper, tmp_path, monkeypatch):
    (tmp_path / "experiments").symlink_to(ROOT)
    monkeypatch.chdir(tmp_path)
    written = set()
    for design in designs.read_designs(paper):
        assert {need for need in design.needs if need.startswith("runs/")} <= written
        written.add(design.results)


@pytest.mark.parametrize("name", often(DESIGNS, "samtone"))
def test_reproduce_at_small_scale_finds_each_design_by_its_paper_and_names_all_its_data(name, monkeypatch):
    monkeypatch.chdir(ROOT.parent)
    (found,) = (
        one for paper in tables.names() for one in designs.read_designs(paper) if one.name == name and one.papers[0] == paper
    )
    assert set(found.tables) <= {table for paper in found.papers for table in tables.read_paper(paper).tables}
    used = set(re.findall(r"\$data/([a-z-]+)", (ROOT / f"{name}.yaml").read_text()))
    assert {need for need in found.needs if need.startswith("data/")} == {f"data/beir/{folder}" for folder in used}
    assert f"--design=experiments/{name}.yaml" in found.commands[0]
    assert found.results.startswith(found.commands[0].split("=")[-1])
