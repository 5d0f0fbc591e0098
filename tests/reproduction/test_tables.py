"""The papers' tables: every name in them is there, every command parses, and the printed numbers agree with each other."""

import re
import shlex
import statistics

import pytest
from often import often

from de_jax import cli, gin_settings
from de_jax.types import InputError
from reproduction import needs, plans, tables
from reproduction.cells import Reproduction, jobs_of, score_name
from reproduction.needs import Run, Sources
from reproduction.tables import read_paper

PAPERS = tables.names()
NOT_AVERAGED = {
    ("1", "SDE, PAIR", "average P@1"): 0.11,
    ("1", "SDE, PAIR", "average MRR"): 0.13,
    ("2", "BM25", "average of 18"): 0.13,
}
"""Averages that the paper prints farther from the mean of what it prints than rounding explains, and how far."""


@pytest.fixture(scope="module")
def sources():
    return Sources("data", "runs")


@pytest.fixture(scope="module")
def papers():
    return {name: read_paper(name) for name in PAPERS}


def rows_of(paper):
    """(table, row, {column: published}) of every row."""
    for table in paper.tables.values():
        for row in table.rows:
            yield table, row, dict(zip([column.name for column in table.columns], row.published, strict=True))


def test_all_five_papers_have_tables(papers):
    assert {name: list(paper.tables) for name, paper in papers.items()} == {
        "ance": ["1", "2"],
        "curriculum": ["2", "figure 7"],
        "daft": ["1", "2", "3"],
        "dance": ["1", "2"],
        "samtone": ["1", "2", "3", "4"],
    }


@pytest.mark.parametrize("name", PAPERS)
def test_every_name_in_a_table_is_there(name, papers, sources):
    paper = papers[name]
    jobs = jobs_of(paper, list(paper.tables.values()), [0], sources)
    assert all(source.files for job in jobs for source in job.needs.sources)
    trained = {job.run.recipe for job in jobs}
    own = {f"{name}/{path.stem}" for path in (needs.RECIPES_DIR / needs.RECIPES / name).glob("*.gin")}
    beside = {one for one in own if re.search(r"_both$|_pair$", one)}  # SamToNe's tables have two of these
    assert own - trained <= beside
    for column in paper.columns.values():
        assert bool(column.evaluation) + bool(column.mean_of) + bool(column.why_not) == 1
        assert not column.evaluation or score_name(column.measure)
    for evaluation in paper.evaluations.values():
        sources.of_data(evaluation.data)
        named = set(re.findall(r"\{(\w+)\}", f"{evaluation.command} {evaluation.per_query}"))
        assert named <= set(evaluation.data)


@pytest.mark.parametrize("name", often(PAPERS, "ance"))
def test_every_run_has_a_plan_before_any_data_and_weights_are_there(name, papers, tmp_path):
    chosen = list(papers[name].tables.values())
    work = Reproduction(papers[name], chosen, [0], Sources(tmp_path / "data", tmp_path / "runs"), tmp_path, pytest.fail)
    runs = plans.plan(work, topology=None, settings=[], run_command=pytest.fail)["runs"]
    assert len(runs) == len(work.jobs)
    assert all(run["total_flops"] > 1e16 for run in runs)


@pytest.mark.soak
def test_a_recipe_is_planned_for_each_of_its_trainings_once(papers, tmp_path, monkeypatch):
    read, lines = needs.read_yaml, []

    def with_long_documents(*args):
        found = read(*args)
        found["trainings"]["triviaqa"]["settings"] = ["PairsOptions.max_doc_length=1024"]
        return found

    monkeypatch.setattr(needs, "read_yaml", with_long_documents)
    sources = Sources(tmp_path / "data", tmp_path / "runs")

    def plan_run(arguments):
        lines.append(arguments)
        return {"memory_gib": {"total": len(lines)}}

    for _ in range(2):
        work = Reproduction(papers["samtone"], papers["samtone"].chosen(["3"]), [0, 1], sources, tmp_path, pytest.fail)
        plan = plans.plan(work, topology="v5e:2x2", settings=[], run_command=plan_run)
        assert len(lines) == len({(one["recipe"], one["training"]) for one in plan["runs"]}) == 6
    runs = {one["run"].removeprefix("samtone/large_ade_spl-"): one for one in plan["runs"]}
    assert runs["msmarco-seed0"]["plan"] == runs["msmarco-seed1"]["plan"] != runs["triviaqa-seed0"]["plan"]
    assert runs["triviaqa-seed0"]["total_flops"] > 3 * runs["msmarco-seed0"]["total_flops"]


def test_missing_data_come_with_what_makes_them(papers, tmp_path):
    sources = Sources(tmp_path / "data", tmp_path / "runs")
    assert [one.name for one in sources.of_data(["nq_test"])] == ["t5_vocabulary", "nq_test"]
    (tmp_path / "data" / "multireqa" / "nq_test").mkdir(parents=True)
    (tmp_path / "data" / "multireqa" / "nq_test" / "manifest.json").touch()
    assert [one.name for one in sources.of_data(["nq_test"])] == ["nq_test"]
    for source in sources.data.values():  # a line that makes data reads only what is listed
        for line in source.make:
            read = {one.name for one in sources.data.values() if re.search(rf"{one.put}\b(?!_)", line)} - {source.name}
            assert read <= {*source.needs, "msmarco", "msmarco_documents"}, line


@pytest.mark.parametrize("name", PAPERS)
def test_every_evaluation_is_a_command_of_ours(name, papers, sources):
    for evaluation in papers[name].evaluations.values():
        verb, flags = cli.split([sources.filled(word) for word in shlex.split(evaluation.command)])
        keep = ["--out_ranks=ranks.json"] if evaluation.per_query == tables.RANKS else []
        cli.command_of(verb).parse(["--run_dir=run", *flags, *keep])


@pytest.mark.parametrize("name", PAPERS)
def test_published_averages_are_those_of_the_published_numbers(name, papers):
    for table, row, published in rows_of(papers[name]):
        for column in table.columns:
            if column.mean_of:
                off = abs(published[column.name] - statistics.fmean(published[one] for one in column.mean_of))
                assert off <= NOT_AVERAGED.get((table.number, row.name, column.name), 0.0501), (table.number, row.name, off)


@pytest.mark.parametrize("name", PAPERS)
def test_published_numbers_are_those_of_the_recipes_comments(name, papers):
    for table, row, published in rows_of(papers[name]):
        recipes = [row.recipe] if isinstance(row.recipe, str) else list(row.recipe.values())
        own = [recipe for recipe in recipes if recipe.startswith(f"{name}/")]
        texts = [(needs.RECIPES_DIR / needs.RECIPES / f"{recipe}.gin").read_text() for recipe in own]
        comment = " ".join(line for text in texts for line in text.splitlines() if line.startswith("#"))
        said = {float(number) for number in re.findall(r"(?<![\w])\d*\.\d+", comment)}
        numbers = [number for number in published.values() if isinstance(number, float)]
        if comment and table.number != "2":  # BEIR's sets stand in no comment
            assert set(numbers) - said <= {0.56, 0.58, 0.554, 0.575}, row.name


def test_a_run_gets_the_places_of_its_data_its_weights_and_the_run_that_it_starts_from(sources):
    found = sources.needs_of(Run("ance/firstp_documents", "msmarco_documents", 3))
    assert [source.name for source in found.sources] == ["msmarco_documents"]
    assert found.first == (Run("ance/bm25_neg", "msmarco", 3),)
    assert found.gin_file == "recipes/paper/ance/firstp_documents.gin"
    assert set(found.bindings) >= {
        "beir_pairs.dataset_dir=data/msmarco-documents",
        "MODEL=runs/ance/bm25_neg-msmarco-seed3",
        "HardNegatives.mine_every_steps=10000",
        "Initialization.seed=3",
    }
    assert not any("negatives_dir" in one for one in found.bindings)  # its own, in its folder
    found = sources.needs_of(Run("daft/bert_at_once", "msmarco", 0))
    assert [source.name for source in found.sources] == [
        "msmarco", "google-bert/bert-base-uncased", "google/bert_uncased_L-2_H-768_A-12",
    ]  # fmt: skip
    found = sources.needs_of(Run("curriculum/curriculum", "msmarco_expanded", 0))
    assert {
        "PairsOptions.negatives_dir=data/negatives/msmarco_bm25_200",
        "PairsOptions.expansion=data/expansions/doct5query",
    } <= set(found.bindings)
    assert sources.weights["Luyu/co-condenser-marco"] in found.sources


def test_settings_that_a_training_adds_are_settings(sources):
    for training, recipe in (("nq", "samtone/base_sde"), ("msmarco", "ance/bm25_neg"), ("dpr_nq", "ance/openqa_nq")):
        found = sources.needs_of(Run(recipe, training, 0))
        bound = gin_settings.read([found.gin_file], found.bindings)
        assert {str(setting) for setting in bound} >= {one.partition("=")[0] for one in found.bindings}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "samtoe",
            r"no tables of the paper 'samtoe' \(did you mean 'samtone'\?\); there are those of ance, curriculum, daft, dance",
        ),
        ("sources", "no tables of the paper 'sources'"),
    ],
)
def test_an_unknown_paper_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        read_paper(name)


def test_an_unknown_table_is_refused(papers):
    with pytest.raises(InputError, match=r"--table is '5'; SamToNe \(Moiseev et al\. 2023\) has '1', '2', '3', '4' here"):
        papers["samtone"].chosen(["5"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("published: [1, 2]", "published: [1]"), r"table '1': the row 'b' has 1 numbers for 2 columns"),
        (("beside: a", "beside: c"), "the row 'b' stands beside 'c', which is no row of it"),
        (("columns: [x, y]", "columns: [x, z]"), "has the column 'z', which is not described"),
        (("mean_of: [x]", "mean_of: [z]"), "the column 'y' is a mean of 'z', which the table does not have"),
        (("evaluation: e", "evaluation: f"), "the column 'x' names an evaluation that the file lacks, 'f'"),
        (("published: [1, 2]", "published: [1, [2]]"), r"tables/1/rows/1/published/1 is \[2\], expected a number"),
        (("beside: a", "besides: a"), "rows/1 is 'besides', expected a key out of name, published, recipe, beside"),
    ],
)
def test_a_table_that_does_not_fit_together_is_refused(tmp_path, monkeypatch, change, message):
    text = (
        "title: T\nevaluations:\n  e: {command: evaluate beir, data: [toy]}\n"
        "columns:\n  x: {training: t, evaluation: e, measure: nDCG@10}\n  y: {mean_of: [x]}\n"
        "tables:\n  '1':\n    title: t\n    columns: [x, y]\n    rows:\n"
        "      - {name: a, recipe: r, published: [0.5, null]}\n      - {name: b, recipe: s, beside: a, published: [1, 2]}\n"
    )
    assert change[0] in text
    (tmp_path / "toy.yaml").write_text(text.replace(*change))
    monkeypatch.setattr(tables, "TABLES_DIR", tmp_path)
    with pytest.raises(InputError, match=message):
        read_paper("toy")
