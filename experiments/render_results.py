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

ROOT = Path(__file__).resolve().parents[1]
DOCS_DIR = ROOT / "docs"

INTRO = """# Results

Which claims of the five papers hold in our runs, one line a claim. All our runs are small: two CPU cores, minutes to hours, small
models and sets. The papers start from pretrained language models and train for long on large sets such as MS MARCO, so a claim that
does not hold here may still hold there. No table of a paper was reproduced at its own size yet; [their recipes and
commands](paper_recipes.md) are ready. Designs, numbers and p-values are on the page [claims and evidence](results/claims.md)."""

HERE = {"yes": "holds here", "partly": "holds in some designs", "no": "does not hold here"}
"""A claim's verdict in words, on the front page."""
UNTESTED = "not testable here"

CLAIMS = """# Claims and evidence

"Partly" means that it holds in some designs, and not in others. Where no measure is named, the numbers below are
differences of nDCG@10.

- A *registered* design was written down before its test split was scored: arms, seeds, measure, and what would count as success.
  Several designs share a test set.
- *p* comes from a paired permutation test over the test queries, with the seeds averaged: it says whether the difference holds for
  other queries, not for other seeds. Holm's correction is applied where a design compares several arms.
- *SDE*: one tower embeds queries and documents. *ADE*: two towers share nothing. *ADE-SPL*: two towers share their projection.
- *The batch's documents*: each query's negatives are the other documents of its batch (in-batch negatives).

The numbers are in `results/*.yaml`, with commands, commits, machines and seeds; this page and the pages below `docs/results/` are
rendered from these files. In a clone of the repository, `python -m reproduction --check <entry>` repeats an entry's commands and
compares the scores. It ends with exit code 1 if a score is outside its tolerance, or if a change recorded with p < .05 comes out
with the other sign or with p of .05 or more. Most tolerances are prediction intervals: with 95 % confidence, runs with other seeds
stay within all tolerances of an entry. The others are stated with a reason. The commands expect data in `data/`
(`data/beir/scifact`, `data/tokenizers/t5`) and MiniLM in `all-MiniLM-L6-v2/`. They reuse runs in `runs/`, so check a change in a
fresh clone."""


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


def pages(themes: Mapping[str, Theme]) -> dict[str, str]:
    """The text of each page, by its place below docs/."""
    of_themes = {f"results/{name}.md": _theme_page(name, theme) for name, theme in themes.items()}
    return {
        "results.md": _front_page(themes),
        "results/claims.md": _claims_page(themes),
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


def _papers(themes: Mapping[str, Theme]) -> list[Paper]:
    return sorted((paper for theme in themes.values() for paper in theme.papers), key=lambda paper: paper.name)


def _front_page(themes: Mapping[str, Theme]) -> str:
    lines = [_RENDERED.format("results/"), INTRO]
    for paper in _papers(themes):
        lines += [f"## {paper.name}", f"![{paper.picture.alt}](images/{paper.picture.file})"]
        link = f"[evidence](results/claims.md#{_anchor(paper)})"
        rows = [[claim.says, f"{HERE[claim.here]} ({link})"] for claim in paper.claims]
        untested = [[text.strip().partition(". ")[0].rstrip("."), UNTESTED] for text in paper.untested]
        lines += [_table([["claim", "verdict"], *rows, *untested])]
    lines += ["## Records", _bullets([f"[{theme.title}](results/{page}.md)" for page, theme in themes.items()])]
    return "\n\n".join(lines) + "\n"


def _anchor(paper: Paper) -> str:
    return "of_" + paper.name.split(" (")[0].lower().replace(" ", "_")


def _claims_page(themes: Mapping[str, Theme]) -> str:
    page_of = {name: page for page, theme in themes.items() for name in theme.entries}
    lines = [_RENDERED.format("results/"), CLAIMS]
    for paper in _papers(themes):
        lines += [f'<a id="{_anchor(paper)}"></a>\n\n## {paper.name}']
        rows = [[claim.says, claim.published, claim.here, _found(claim, page_of)] for claim in paper.claims]
        lines += [_table([["claim", "published", "here", "our results"], *rows])]
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
