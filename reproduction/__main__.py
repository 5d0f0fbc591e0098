"""Trains and scores the runs of a paper's tables, and puts our numbers beside the published ones; prints one JSON object.

python -m reproduction samtone --table 1 --dry_run             # runs, steps, FLOPs, and missing data
python -m reproduction samtone --table 1 --seeds 0 1 2         # trains and scores, a cell after another
python -m reproduction samtone --scale small                   # the design that shows its effect on small data, in hours on a CPU
python -m reproduction --check bm25                            # a recorded result again; exit code 1 if a score is out of tolerance
python -m reproduction analyse embeddings --help               # figures of a run; `verbs` has them all

Papers: ance, curriculum, daft, dance, samtone. Nothing is downloaded. Missing data and weights are listed: where to get them, and
where to put them below --data_dir; cells that have all they need are filled meanwhile. <out_dir>/<paper> gets a table_<number>.md,
written again after each score, and the same cell by cell as JSON lines. The same command continues a stopped one.
--dry_run with a --topology of plan compiles the step of each recipe for its memory, in minutes each.

Run it in a clone of the repository, which has the tables, designs and results; they are not installed. docs/results.md lists the
entries. --scale small first runs the designs, also of other papers, whose missing results the paper's designs need.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from de_jax import command
from de_jax.files import outputs
from de_jax.reports.tables import text_table
from de_jax.settings import Seed, numeric
from de_jax.types import InputError
from reproduction import commands, designs, filled, plans, verbs
from reproduction.cells import Reproduction
from reproduction.needs import Sources
from reproduction.result_check import check_entry
from reproduction.tables import names, read_paper


def main(argv: list[str] | None = None) -> None:
    """The command."""
    verb = " ".join((sys.argv[1:] if argv is None else argv)[:2])
    if verb in verbs.VERBS:
        verbs.call(verb, (sys.argv[1:] if argv is None else argv)[2:])
        return
    args, settings = _parse_args(argv)
    if args.check:
        check_entry(args.check)
        return
    if not args.paper:
        raise InputError(f"name a paper: {', '.join(names())}.")
    paper = read_paper(args.paper)
    chosen = paper.chosen(args.table)
    if args.scale == "small":
        _small(paper.name, args)
        return
    sources = Sources(args.data_dir, args.out_dir / "runs")
    work_of = functools.partial(Reproduction, paper, chosen, args.seeds, sources, args.out_dir, commands.run, settings)
    if args.dry_run:
        _plan(work_of(), args.topology, settings)
        return
    with outputs.only_one(args.out_dir / ".lock", f"reproducing into {args.out_dir}"):
        _fill(work_of())  # finished work is read under the lock


def _plan(work: Reproduction, topology: str | None, settings: list[str]) -> None:
    _say(*plans.missing_lines(work.missing()))
    plan = plans.plan(work, topology=topology, settings=settings, run_command=commands.run)
    _say("", text_table(*plans.run_lines(plan["runs"])))
    print(json.dumps(plan))


def _fill(work: Reproduction) -> None:
    missing = work.missing()
    _say(*plans.missing_lines(missing))
    work.fill(lambda: filled.write_tables(work))
    found = filled.write_tables(work)
    _say("", *(Path(path).read_text(encoding="utf-8") for path in found["tables"].values()))
    print(json.dumps({"paper": work.paper.name, **found, "missing": [one.source.name for one in missing]}))
    if missing:
        raise InputError(f"{len(missing)} data sets or models are missing, as listed above; the other cells are filled.")


def _small(paper: str, args: argparse.Namespace) -> None:
    found = designs.read_designs(paper, args.table)
    if args.dry_run:
        print(json.dumps({"paper": paper, "designs": [design._asdict() for design in found]}))
        return
    reports = designs.run_designs(found, commands.call)
    for results in (Path(report["results"]) for report in reports if report["results"]):
        _say("", str(results))
        if results.name == "report.json" and results.is_file():
            _say(*designs.design_tables(outputs.read_json(results)))
    print(json.dumps({"paper": paper, "designs": reports}))


def _say(*lines: str) -> None:
    if lines:
        print("\n".join(lines), file=sys.stderr)


def _parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = command.Parser(description=__doc__)
    parser.add_argument("paper", nargs="?", type=str, help=f"one of {', '.join(names())}")
    parser.add_argument("--check", metavar="ENTRY", type=str, help="in place of a paper: an entry of results/*.yaml")
    parser.add_argument("--table", nargs="+", metavar="N", help="some of its tables (default all)")
    parser.add_argument(
        "--scale", choices=["paper", "small"], default="paper", help="the paper's own runs (default), or designs on small data"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the plan, and train nothing")
    parser.add_argument("--topology", help="with --dry_run: devices to compile the steps for, such as v5e:8x8")
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=numeric(Seed),
        default=[0],
        help="of parameters, dropout and batches; the tables have these (default 0)",
    )
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="where data and weights lie (default data)")
    parser.add_argument(
        "--out_dir", type=Path, default=Path("runs/reproduce"), help="gets runs and tables (default runs/reproduce)"
    )
    args, settings = commands.parse_with_settings(parser, argv)
    if args.check and args.paper:
        raise InputError(f"--check names an entry, of whichever paper it is; leave {args.paper} out.")
    flag, used = ("--check", ("check",)) if args.check else ("--scale=small", ("paper", "scale", "table", "dry_run"))
    if args.check or args.scale == "small":  # whose registered commands have data and settings of their own
        given = [name for name in vars(args) if name not in used and getattr(args, name) != parser.get_default(name)]
        if given := given + [f"gin.{setting}" for setting in settings]:
            raise InputError(f"--{given[0]} changes nothing beside {flag}; leave one of them out.")
    if args.topology and not args.dry_run:
        raise InputError("--topology plans, and trains nothing; give --dry_run beside it, or leave it out.")
    return args, settings


if __name__ == "__main__":
    command.run(main)
