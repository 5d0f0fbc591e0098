"""Writes docs/results.md, docs/results/ and the pictures that are drawn from the tables alone, all of them from results/*.yaml.

python -m experiments.render_results
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from de_jax import command
from de_jax.files import outputs
from de_jax.reports import plots
from reproduction.result_files import Claim, Drawing, Entry, Paper, Theme, entries_of, expected, read_all
from reproduction.seed_evidence import LEVEL, Effect, effects_of, pooled

ROOT = Path(__file__).resolve().parents[1]
DOCS_DIR = ROOT / "docs"

INTRO = """# Results

Which claims of the five papers hold in our runs, one line a claim. All our runs are small: two CPU cores, minutes to hours, small
models and sets. The papers start from pretrained language models and train for long on large sets such as MS MARCO, so a claim that
does not hold here may still hold there. "Under-tuned" says more: one or two learning rates were tried, so a better one may lie
beyond them. No table of a paper was reproduced at its own size yet; [their recipes and commands](paper_recipes.md) are ready.
Designs, numbers and p-values are on the page [claims and evidence](results/claims.md)."""

HERE = {"yes": "holds here", "partly": "holds in some designs", "no": "does not hold here"}
"""A claim's verdict in words, on the front page."""
UNTESTED = "not testable here"

CLAIMS = """# Claims and evidence

"Partly" means that it holds in some designs, and not in others. "Under-tuned" means that in each design an arm of the claim had one
learning rate, or its best one was the lowest or the highest of its grid, so another may still show the claim. Where no measure is
named, the numbers below are differences of nDCG@10.

- A *registered* design was written down before its test split was scored: arms, seeds, measure, and what would count as success.
  Several designs share a test set.
- *p* comes from a paired permutation test over the test queries, with the seeds averaged: it says whether the difference holds for
  other queries, not for other seeds. Holm's correction is applied where a design compares several arms.
- *With seeds* counts seeds as a sample too: the mean effect, its interval of 95 %, and how many of the changes with p < .05 over
  queries, up or down, have it with seeds too. [Seeds and queries](seeds.md) describes these.
- *SDE*: one tower embeds queries and documents. *ADE*: two towers share nothing. *ADE-SPL*: two towers share their projection.
- *The batch's documents*: each query's negatives are the other documents of its batch (in-batch negatives).

The numbers are in `results/*.yaml`, with commands, commits, machines and seeds; this page and the pages below `docs/results/` are
rendered from these files. In a clone of the repository, `python -m reproduction --check <entry>` repeats an entry's commands and
compares the scores. It ends with exit code 1 if a score is outside its tolerance, or if a change recorded with p < .05 comes out
with the other sign or with p of .05 or more. Most tolerances are prediction intervals: with 95 % confidence, runs with other seeds
stay within all tolerances of an entry. The others are stated with a reason. The commands expect data in `data/`
(`data/beir/scifact`, `data/tokenizers/t5`) and MiniLM in `all-MiniLM-L6-v2/`. They reuse runs in `runs/`, so check a change in a
fresh clone."""


SEEDS = """# Seeds and queries

A p-value over queries asks whether a difference holds for other queries of the same trained models. Training again draws other
seeds. The intervals below count both. They are computed from the records: the queries' variance from the recorded p, the seeds'
from both arms' deviations, as if the arms' seeds had nothing in common. Each is more likely too large than too small, so "not
shown" means that these records cannot show it. For runs with scores at hand, `de-jax compare runs` computes the exact test (two
crossed random factors), as `p_seeds`.

The *mean effect* of a claim is over data sets, by random effects (DerSimonian and Laird; the interval by Hartung and Knapp).
Designs on one set share its queries and often a start, and count as one. With three sets the interval is wide by nature. Sets
that were only scored, not trained on, are left out. *Visible* is the change that four of five such designs would show with seeds
(a power of .8): a design cannot be expected to see a smaller one."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    command.Parser(description=__doc__).parse_args(argv)
    themes = read_all(ROOT / "results")
    for name, text in pages(themes).items():
        with outputs.atomic_file(DOCS_DIR / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(DOCS_DIR / name, file=sys.stderr)
    for picture, drawing in (drawn for theme in themes.values() for drawn in theme.drawn()):
        draw(drawing, entries_of(themes), DOCS_DIR / "images" / picture.file)
    for paper in _papers(themes):
        if rows := _forest(paper, themes):
            draw_forest(rows, DOCS_DIR / "images" / _forest_file(paper))


def pages(themes: Mapping[str, Theme]) -> dict[str, str]:
    """The text of each page, by its place below docs/."""
    of_themes = {f"results/{name}.md": _theme_page(name, theme) for name, theme in themes.items()}
    return {
        "results.md": _front_page(themes),
        "results/claims.md": _claims_page(themes),
        "results/seeds.md": _seeds_page(themes),
        **{name: f"{text}\n" for name, text in of_themes.items()},
    }


def draw(drawing: Drawing, entries: Mapping[str, Entry], out_png: str | Path) -> None:
    """Means and deviations of the same rows, a panel for each column; the dashed line is the first row's mean."""
    with plots.new_figure(out_png, figsize=(1.6 + 1.5 * len(drawing.panels), 0.7 + 0.24 * len(drawing.rows))) as figure:
        axes = figure.subplots(1, len(drawing.panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, drawing.panels, strict=True):
            table = entries[panel.entry].tables[panel.table - 1]
            numbers = [expected(table.cell(row, panel.column)) for row in drawing.rows]
            places, means = range(len(numbers)), [mean for mean, _ in numbers]
            axis.axvline(means[0], color=plots.INK, linewidth=0.8, linestyle="--")
            deviations = [deviation or 0.0 for _, deviation in numbers]
            axis.errorbar(means, places, xerr=deviations, fmt="o", markersize=4, color=plots.DOC_COLOUR, linewidth=1)
            axis.set_title(panel.title, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.locator_params(axis="x", nbins=3)
        axes[0].set_yticks(range(len(drawing.rows)), [row.replace("`", "") for row in drawing.rows])
        axes[0].set_ylim(len(drawing.rows) - 0.5, -0.5)


def draw_forest(rows: Sequence[tuple[str, float, float, float, bool]], out_png: str | Path) -> None:
    """Effects with their intervals, one a line: (label, effect, low, high, whether it is the mean of a claim)."""
    with plots.new_figure(out_png, figsize=(7.2, 0.9 + 0.2 * len(rows))) as figure:
        axis = figure.subplots()
        axis.axvline(0.0, color=plots.INK, linewidth=0.8)
        for place, (_, effect, low, high, is_mean) in enumerate(rows):
            colour, marker = (plots.QUERY_COLOUR, "D") if is_mean else (plots.DOC_COLOUR, "o")
            axis.plot([low, high], [place, place], color=colour, linewidth=1)
            axis.plot([effect], [place], marker, color=colour, markersize=4)
        axis.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=7)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        largest = 2 * max(abs(effect) for _, effect, *_ in rows)
        axis.set_xlim(-largest, largest)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlabel("change, with 95 % over seeds and queries", fontsize=7)


def _papers(themes: Mapping[str, Theme]) -> list[Paper]:
    return sorted((paper for theme in themes.values() for paper in theme.papers), key=lambda paper: paper.name)


def _front_page(themes: Mapping[str, Theme]) -> str:
    lines = [_RENDERED.format("results/"), INTRO]
    for paper in _papers(themes):
        lines += [f"## {paper.name}", f"![{paper.picture.alt}](images/{paper.picture.file})"]
        link = f"[evidence](results/claims.md#{_anchor(paper)})"
        outcomes = [HERE[claim.here] + ", under-tuned" * claim.under_tuned for claim in paper.claims]
        rows = [[claim.says, f"{outcome} ({link})"] for claim, outcome in zip(paper.claims, outcomes, strict=True)]
        untested = [[text.strip().partition(". ")[0].rstrip("."), UNTESTED] for text in paper.untested]
        lines += [_table([["claim", "verdict"], *rows, *untested])]
    lines += ["## Records", _bullets([f"[{theme.title}](results/{page}.md)" for page, theme in themes.items()])]
    return "\n\n".join(lines) + "\n"


def _effects(claim: Claim, themes: Mapping[str, Theme]) -> list[Effect]:
    """The effects of a claim on the sets that were trained on."""
    entries = entries_of(themes)
    found = [effect for name in claim.entries for effect in effects_of(name, entries[name], ROOT)]
    trained_on = [one for one in found if ", scored on" not in one.data]
    return [one for one in trained_on if {one.change, f"{one.entry}: {one.change}"} & set(claim.effects)]


def _with_seeds(claim: Claim, themes: Mapping[str, Theme]) -> str:
    effects = _effects(claim, themes)
    if not effects:
        return "not computed"
    mean, told = pooled(effects), [one for one in effects if one.p_queries < LEVEL]
    gains, losses = (sum(one.p < LEVEL and sign * one.difference > 0 for one in told) for sign in (1, -1))
    sets = f"{mean.num_sets} set{'s' if mean.num_sets > 1 else ''}"
    kept = f"of {len(told)} with p < .05 over queries, {gains} up and {losses} down keep it"
    return f"{mean.difference:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}], {sets}; {kept}"


def _forest(paper: Paper, themes: Mapping[str, Theme]) -> list[tuple[str, float, float, float, bool]]:
    rows = []
    for number, claim in enumerate(paper.claims, start=1):
        if effects := _effects(claim, themes):
            rows += [(f"{one.entry}: {one.change}, {one.data}", one.difference, *one.interval, False) for one in effects]
            mean = pooled(effects)
            rows.append((f"claim {number}, mean effect", mean.difference, mean.low, mean.high, True))
    return rows


def _forest_file(paper: Paper) -> str:
    return f"effects_{_anchor(paper).removeprefix('of_')}.png"


def _seeds_page(themes: Mapping[str, Theme]) -> str:
    every = [one for name, entry in entries_of(themes).items() for one in effects_of(name, entry, ROOT)]
    told = [one for one in every if one.p_queries < LEVEL]
    num_lost = sum(one.p >= LEVEL for one in told)
    lines = [_RENDERED.format("results/"), SEEDS]
    lost = f"**{num_lost} of these are not shown with seeds.**"
    lines.append(f"Of {len(every)} recorded changes whose p gives their variance, {len(told)} have p < .05 over queries. {lost}")
    for paper in _papers(themes):
        claims = [(number, claim) for number, claim in enumerate(paper.claims, start=1) if claim.effects]
        if claims:
            lines += [f"## {paper.name}", f"![Effects of {paper.name} with their intervals](../images/{_forest_file(paper)})"]
            rows = [[str(number), claim.says, claim.outcome, _with_seeds(claim, themes)] for number, claim in claims]
            lines.append(_table([["", "claim", "here", "mean effect [95 %], sets; changes that keep p < .05 with seeds"], *rows]))
    lines += [
        "## All changes",
        _table([["entry", "change", "set", "effect [95 %]", "p over queries", "p with seeds", "visible"], *_rows(every)]),
    ]
    return "\n\n".join(lines) + "\n"


def _rows(effects: Sequence[Effect]) -> Iterator[list[str]]:
    for one in effects:
        low, high = one.interval
        interval = f"{one.difference:+.4f} [{low:+.4f}, {high:+.4f}]"
        visible = f"{one.smallest_visible:.4f}"
        yield [one.entry, f"`{one.change}`", one.data, interval, f"{one.p_queries:g}", f"{one.p:.2g}", visible]


def _anchor(paper: Paper) -> str:
    return "of_" + paper.name.split(" (")[0].lower().replace(" ", "_")


def _claims_page(themes: Mapping[str, Theme]) -> str:
    page_of = {name: page for page, theme in themes.items() for name in theme.entries}
    lines = [_RENDERED.format("results/"), CLAIMS]
    for paper in _papers(themes):
        lines += [f'<a id="{_anchor(paper)}"></a>\n\n## {paper.name}']
        rows = [[one.says, one.published, one.outcome, _found(one, page_of), _with_seeds(one, themes)] for one in paper.claims]
        lines += [_table([["claim", "published", "here", "our results", "with seeds"], *rows])]
        lines += ["Not tested here:", _bullets(paper.untested)]
    lines += ["## All results"]
    for page, theme in themes.items():
        links = [f"[{entry.title}]({page}.md#{name})" for name, entry in theme.entries.items()]
        lines += [f"{theme.title}:", _bullets(links)]
    return "\n\n".join(lines).replace("](results/", "](") + "\n"  # an untested claim may link to a record


def _found(claim: Claim, page_of: Mapping[str, str]) -> str:
    links = [f"[{number}]({page_of[name]}.md#{name})" for number, name in enumerate(claim.entries, start=1)]
    return f"{claim.found} ({', '.join(links)})" if links else claim.found


def _theme_page(name: str, theme: Theme) -> str:
    lines = [_RENDERED.format(f"results/{name}.yaml"), f"# {theme.title}", theme.intro.rstrip()]
    for entry_name, entry in theme.entries.items():
        lines += _entry(entry_name, entry)
    return "\n\n".join(filter(None, lines))


def _entry(name: str, entry: Entry) -> Iterator[str]:
    yield f'<a id="{name}"></a>\n\n## {entry.title}'
    yield f"{entry.question} **{entry.verdict}**"
    yield entry.method.rstrip()
    if entry.commands:
        yield "\n".join(["```bash", *(command.rstrip() for command in entry.commands), "```"])
    for table in entry.tables:
        yield table.caption.rstrip()
        yield _table(table.rows)
    yield from (f"![{picture.alt}](../images/{picture.file})" for picture in entry.pictures)
    yield _bullets(entry.findings)
    if entry.caveats:
        yield "Read with care:"
        yield _bullets(entry.caveats)
    yield " ".join(_provenance(name, entry))


def _provenance(name: str, entry: Entry) -> Iterator[str]:
    """Where, when and by which code; and whether a command checks it."""
    if not entry.commits:
        yield "*Not run yet.*"
        return
    seeds = f"seed{'s' if len(entry.seeds) > 1 else ''} {', '.join(map(str, entry.seeds))}; " if entry.seeds else ""
    commits = f"commit{'s' if len(entry.commits) > 1 else ''} {', '.join(entry.commits)}"
    yield f"*{entry.date}; {entry.machine}; {entry.versions}; {seeds}{commits}.*"
    if entry.design:
        yield f"*Registered before a test split was scored: `{entry.design}`.*"
    if any(table.scores for table in entry.tables):
        yield f"*Check it: `python -m reproduction --check {name}`.*"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others])


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(sentence.split())}" for sentence in sentences)


_RENDERED = "<!-- Rendered from {} by python -m experiments.render_results: edit that. -->"


if __name__ == "__main__":
    command.run(main)
