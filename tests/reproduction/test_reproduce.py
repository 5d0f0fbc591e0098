"""A paper of one table over the tiny data set: filled cell by cell, continued where it stopped, and refused in clear sentences."""

import contextlib
import io
import json
import shutil
import sys

import pytest
import toy_run
from scipy import stats
from tiny_run import QRELS

from de_jax import cli
from de_jax.evaluation import metrics
from de_jax.types import InputError
from reproduction import __main__ as reproduce
from reproduction import commands, tables

PAPER = """
title: A toy paper
evaluations:
  test:
    command: evaluate beir --dataset_dir={toy} --measures nDCG@3 RR@10 --no_bm25
    data: [toy]
    per_query: "{toy}/qrels/test.tsv"
  ranks: {command: "evaluate sentences --dataset_dir={toy} --no_bm25", data: [toy], per_query: ranks}
columns:
  nDCG: {training: toy, evaluation: test, measure: nDCG@3}
  MRR: {training: toy, evaluation: ranks, measure: RR}
  mean: {mean_of: [nDCG, MRR]}
  latency: {why_not: it depends on the machine}
tables:
  "1":
    title: two losses
    percent: true
    digits: 1
    columns: [nDCG, MRR, mean, latency]
    rows:
      - {name: plain, recipe: samtone/base_sde, published: [50.0, collapses, null, 3.0]}
      - {name: SamToNe, recipe: samtone/base_sde_query, beside: plain, published: [60.0, 40.0, 50.0, 3.0]}
      - {name: BM25, published: [30.0, 30.0, 30.0, null]}
  "2": {title: a table without a design, columns: [nDCG], rows: [{name: BM25, published: [30.0]}]}
"""
SOURCES = """
data:
  toy: {what: ten documents, from: "https://example.org/toy.zip", put: toy, files: [corpus.jsonl*, qrels/test.tsv]}
weights:
  google/t5-v1_1-base:
    files: [config.json]
    sizes: {model_type: t5, vocab_size: 32128, d_model: 64, num_layers: 2, num_heads: 4, d_kv: 64, d_ff: 64}
trainings:
  toy: {data: [toy], settings: ["beir_pairs.dataset_dir={toy}"]}
"""
RUNS = {"plain": "samtone/base_sde-toy-seed0", "SamToNe": "samtone/base_sde_query-toy-seed0"}


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """The paper "toy" and its sources."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "toy.yaml").write_text(PAPER)
    (tmp_path / "tables" / "sources.yaml").write_text(SOURCES)
    monkeypatch.setattr(tables, "TABLES_DIR", tmp_path / "tables")
    return tmp_path


@pytest.fixture
def data(paper, dataset_dir):
    """What the paper needs, in its place."""
    shutil.copytree(dataset_dir, paper / "data" / "toy")
    weights = paper / "data" / "models" / "google" / "t5-v1_1-base"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    return paper / "data"


class Commands:
    """Runs commands in this process; a training is a copy of a run, of another checkpoint for SamToNe."""

    def __init__(self, trained):
        self.trained, self.lines, self.fails_at = trained, [], None

    def __call__(self, arguments):
        if len(self.lines) == self.fails_at:
            raise InputError("the disk is full.")
        verb, flags = cli.split(arguments)
        self.lines.append(list(arguments))
        if verb == "train":
            run_dir = next(flag.partition("=")[2] for flag in flags if flag.startswith("--run_dir="))
            shutil.copytree(self.trained, run_dir)
            if "base_sde_query" in run_dir:
                shutil.rmtree(f"{run_dir}/checkpoints/7")
            return {"step": 7, "stopped": None}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            cli.call(verb, flags)
        return json.loads(out.getvalue())


@pytest.fixture
def run(trained, monkeypatch):
    run = Commands(trained)
    monkeypatch.setattr(commands, "run", run)
    return run


@pytest.fixture
def small(paper, monkeypatch, capsys):
    """Runs --scale small in a folder with these designs, each its needs; a design writes a report of its own name."""
    monkeypatch.chdir(paper)
    (paper / "experiments").mkdir()

    def call(*flags, **needs):
        for name, own in needs.items():
            program = f"import shutil; shutil.copyfile(*{['report.json', f'{name}/report.json']})"
            text = {
                "paper": "toy" if name.startswith("toy") else "other",
                "commands": [f'python -c "{program}"'],
                "needs": own,
                "results": f"{name}/report.json",
            }
            (paper / name).mkdir(exist_ok=True)
            (paper / "experiments" / f"{name}.yaml").write_text(json.dumps(text))
        reproduce.main(["toy", "--scale=small", *flags])
        out, err = capsys.readouterr()
        return json.loads(out), err

    return call


@pytest.fixture
def reproduced(paper, capsys):
    """Runs the command, and gives what it printed to stdout and stderr."""

    def call(*flags):
        reproduce.main(["toy", f"--data_dir={paper / 'data'}", f"--out_dir={paper / 'out'}", *flags])
        out, err = capsys.readouterr()
        return json.loads(out), err

    return call


def cells(paper):
    lines = (paper / "out" / "toy" / "table_1.jsonl").read_text().splitlines()
    return {(cell["row"], cell["column"]): cell for cell in map(json.loads, lines)}


def test_cells_are_filled_beside_the_published_numbers_and_none_of_them_twice(paper, data, run, reproduced):
    run.fails_at = 4  # SamToNe is trained, and not scored
    with pytest.raises(InputError, match="the disk is full"):
        reproduced()
    assert cells(paper)["plain", "MRR"]["ours"] is not None
    assert cells(paper)["SamToNe", "MRR"]["ours"] is None
    run.fails_at = None
    report, err = reproduced()
    assert (report["num_cells"], report["num_filled"], report["missing"]) == (13, 6, [])
    assert [cli.split(line)[0] for line in run.lines] == ["train", "evaluate beir", "evaluate sentences"] * 2
    assert run.lines[0][1:] == [
        "--gin_file=recipes/paper/samtone/base_sde.gin", f"--gin.beir_pairs.dataset_dir={data / 'toy'}",
        "--gin.Initialization.seed=0", "--gin.PairsOptions.seed=0", f"--gin.MODEL={data / 'models' / 'google' / 't5-v1_1-base'}",
        f"--run_dir={paper / 'out' / 'runs' / RUNS['plain']}",
    ]  # fmt: skip
    found, per_query = cells(paper), {}
    for row, folder in RUNS.items():
        for kept in (paper / "out" / "runs" / folder / "evaluations").iterdir():
            column, measure = {"nDCG@3": ("nDCG", "nDCG@3"), "P@1": ("MRR", "RR")}[
                json.loads((kept / "result.json").read_text())["settings"]["measures"][0]
            ]
            scores = metrics.scores_by_query(metrics.read_trec_run(kept / "dense.trec"), QRELS["test"], measure)
            per_query[row, column] = [scores[query_id] for query_id in QRELS["test"]]  # the ten documents are all ranked
    assert len(per_query) == 4
    for row, column in per_query:
        cell = found[row, column]
        assert cell["ours"] == pytest.approx(50 * sum(per_query[row, column]), rel=1e-6)
        assert cell["seeds"] == {"0": cell["ours"]}
        assert cell["difference"] == (None if isinstance(cell["published"], str) else cell["ours"] - cell["published"])
    for column in ("nDCG", "MRR"):
        cell = found["SamToNe", column]
        own, baseline = per_query["SamToNe", column], per_query["plain", column]
        assert cell["gain"] == pytest.approx(50 * (sum(own) - sum(baseline)), abs=1e-6)
        is_equal = own == baseline
        assert cell["p_t_test"] == pytest.approx(1.0 if is_equal else stats.ttest_rel(own, baseline).pvalue, abs=1e-9)
        assert found["plain", column]["p_t_test"] is None
    assert found["plain", "mean"]["ours"] == pytest.approx((found["plain", "nDCG"]["ours"] + found["plain", "MRR"]["ours"]) / 2)
    assert (found["BM25", "nDCG"]["published"], found["BM25", "nDCG"]["ours"]) == (30.0, None)
    page = (paper / "out" / "toy" / "table_1.md").read_text()
    assert page in err
    assert "| plain | paper | 50.0 | collapses |  | 3.0 |" in page
    assert f"|  | ours, 1 seed | **{found['plain', 'nDCG']['ours']:.1f}** |" in page
    assert f"|  | beside plain | {found['SamToNe', 'nDCG']['gain']:+.1f} (p " in page
    assert "latency: it depends on the machine." in page
    reproduced()
    assert len(run.lines) == 6
    with pytest.raises(InputError, match=r"was trained with other --gin settings \(none\); give these, or another --out_dir"):
        reproduced("--gin.make_mesh.fsdp=2")
    moved = data.rename(paper / "moved")
    with pytest.raises(InputError, match=rf"was trained on the data in {data}, not in {moved}; give that --data_dir, or another"):
        reproduced(f"--data_dir={moved}")
    assert len(run.lines) == 6


def test_missing_data_and_weights_are_listed_and_nothing_runs(paper, run, capsys):
    flags = [f"--data_dir={paper / 'data'}", f"--out_dir={paper / 'out'}"]
    with pytest.raises(InputError, match="2 data sets or models are missing, as listed above"):
        reproduce.main(["toy", *flags])
    err = capsys.readouterr().err
    assert "toy: ten documents\n  get it from  https://example.org/toy.zip\n" in err
    assert f"  put it at    {paper / 'data' / 'toy'} (lacks corpus.jsonl*, qrels/test.tsv)\n" in err
    assert "  get it from  https://huggingface.co/google/t5-v1_1-base\n" in err
    assert err.count("  needed by    table 1: all rows\n") == 2
    assert run.lines == []


def test_a_dry_run_plans_without_weights(paper, run, reproduced):
    plan, err = reproduced("--dry_run", "--seeds", "0", "1", "--gin.T5Config.num_layers=0")
    assert [one["run"] for one in plan["runs"]] == [f"{folder[:-1]}{seed}" for folder in RUNS.values() for seed in (0, 1)]
    assert {(one["num_steps"], one["batch_size"], one["query_length"]) for one in plan["runs"]} == {(20000, 512, 64)}
    assert all(one["num_parameters"] > 2e7 and one["total_flops"] == 20000 * one["useful_flops"] for one in plan["runs"])
    assert plan["missing"] == ["toy", "google/t5-v1_1-base"]
    assert {"table": "1", "row": "plain", "column": "nDCG", "runs": [one["run"] for one in plan["runs"][:2]]} in plan["cells"]
    assert "20,000" in err
    assert run.lines == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--dry_run", "--gin.train.no_such=1"], "Recipe has no setting 'no_such'"),
        (["--topology=cpu:1"], "--topology plans, and trains nothing; give --dry_run beside it"),
        (["--check=bm25"], "--check names an entry, of whichever paper it is; leave toy out"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_runs(run, reproduced, flags, sentence):
    with pytest.raises(InputError, match=sentence):
        reproduced(*flags)
    assert run.lines == []


def test_small_designs_run_their_commands(paper, small):
    with pytest.raises(InputError, match=r"holds no design of toy; run --scale small in a checkout"):
        small()
    (paper / "experiments" / "other.yaml").write_text("question: without commands of its own\n")
    design = paper / "experiments" / "toy.yaml"
    design.write_text(
        "paper: toy\ntable: 1\nneeds: [data.txt]\nresults: out.md\n"
        "commands:\n  - python -c \"open('out.md', 'w').write(open('data.txt').read())\"\n"
    )
    with pytest.raises(InputError, match=r"experiments/toy\.yaml needs data\.txt, which does not exist"):
        small()
    (paper / "data.txt").write_text("| a table |")
    assert small("--dry_run")[0]["designs"][0]["tables"] == ["1"]
    report, err = small("--table=1")
    assert (report["designs"][0]["design"], report["designs"][0]["results"]) == ("toy", "out.md")
    assert err.endswith("\nout.md\n")
    assert (paper / "out.md").read_text() == "| a table |"
    design.write_text(f"paper: toy\ncommands: [\"{sys.executable} -c 'raise SystemExit(3)'\"]\n")
    with pytest.raises(InputError, match="failed, as it says above"):
        small()
    design.write_text(design.read_text() + "table: [1, 3]\n")
    with pytest.raises(InputError, match=r"--table is 2, for which toy has no design; there are designs for 1, 3\."):
        small("--table=2")


REPORT = {
    "design": "toy.yaml",
    "sets": {
        "one": {
            "arms": {"plain": {"mean": {"mrr@10": 0.25, "ndcg@10": 0.5}}, "mined": {"mean": {"mrr@10": 0.125, "ndcg@10": 0.375}}},
            "compared": [
                {
                    "baseline": "plain",
                    "measure": "mrr@10",
                    "systems": {"plain": {}, "mined": {"difference": -0.125, "p_permutation": 0.01, "holm_permutation": 0.03}},
                }
            ],
        },
    },
}
SMALL = {
    "toy_a": ["z/report.json", "toy_b/report.json"],
    "toy_b": ["known/report.json"],
    "z": ["other_data"],
    "known": [],
    "unused": [],
}  # "toy_b" needs "known", whose results exist


def test_small_designs_come_after_those_whose_results_they_need_also_of_other_papers(paper, small):
    for name in ("known/report.json", "other_data", "report.json"):
        (paper / name).parent.mkdir(exist_ok=True)
        (paper / name).write_text(json.dumps(REPORT))
    planned = [one["name"] for one in small("--dry_run", **SMALL)[0]["designs"]]
    assert sorted(planned) == ["toy_a", "toy_b", "z"]
    assert planned[-1] == "toy_a"
    report, err = small()
    assert [one["design"] for one in report["designs"]] == planned
    assert err[err.index("toy_a/report.json\ntoy.yaml") :].splitlines() == [
        "toy_a/report.json",
        "toy.yaml: one  mrr@10  ndcg@10",
        "plain          0.2500   0.5000",
        "mined          0.1250   0.3750",
        "difference in mrr@10           p (Holm)",
        "mined beside plain    -0.1250    0.0300",
    ]


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        ({"toy_b": ["toy_a/report.json"], "toy_a": ["toy_b/report.json"]}, r"experiments/toy_a\.yaml -> .*toy_b\.yaml"),
        ({"toy_b": ["absent/report.json"]}, r"toy_b\.yaml needs absent/report\.json, .* not the `results` of an earlier design"),
        ({"z": ["absent"]}, r"z\.yaml needs absent, which does not exist"),
    ],
)
def test_small_designs_that_cannot_all_run_are_refused_before_any_does(paper, small, needs, sentence):
    for name in ("known/report.json", "other_data", "report.json"):
        (paper / name).parent.mkdir(exist_ok=True)
        (paper / name).write_text(json.dumps(REPORT))
    with pytest.raises(InputError, match=sentence):
        small(**SMALL | needs)
    assert not list(paper.glob("[tz]*/report.json"))


@pytest.mark.parametrize("flag", ["--data_dir=other", "--out_dir=out", "--seeds=1", "--topology=v5e:8x8", "--gin.Miner.seed=1"])
@pytest.mark.parametrize("registered", [["toy", "--scale=small"], ["--check=toy"]])
def test_registered_commands_take_no_settings(paper, small, registered, flag):
    with pytest.raises(InputError, match=rf"^{flag.split('=')[0]}.* changes nothing beside {registered[-1].split('=t')[0]}; leave"):
        reproduce.main([*registered, flag])


def test_a_paper_has_to_be_named(paper):
    with pytest.raises(InputError, match="name a paper: toy"):
        reproduce.main([])


@pytest.mark.soak
def test_a_toy_is_reproduced_by_processes_of_its_own(paper, trained, reproduced):
    folder = toy_run.write_dataset(paper / "data" / "toy")
    (folder / "qrels" / "dev.tsv").rename(folder / "qrels" / "test.tsv")
    model = paper / "data" / "models" / "google" / "t5-v1_1-base"
    model.parent.mkdir(parents=True)
    model.symlink_to(trained)  # of the sizes below
    sizes = {"vocab_size": 30, "model_dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "dropout_rate": 0.0}
    settings = {f"T5Config.{name}": value for name, value in sizes.items()}
    settings |= {"Optimization.num_steps": 4, "PairsOptions.batch_size": 16, "beir_pairs.dataset_dir": folder}
    training = json.dumps([f"{name}={value}" for name, value in settings.items()])
    sources = SOURCES.replace('["beir_pairs.dataset_dir={toy}"]', training).replace("[config.json]", "[run.json]")
    (paper / "tables" / "sources.yaml").write_text(sources)
    report, _ = reproduced()
    assert report["num_filled"] == 6
    assert cells(paper)["SamToNe", "MRR"]["p_permutation"] is not None
