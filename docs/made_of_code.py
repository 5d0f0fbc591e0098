"""A hook of MkDocs: `<!-- made of code: NAME -->` in a page becomes a table or list that is made from the code.

mkdocs build --strict
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from de_jax import cli, command, gin_settings
from de_jax.gin_settings import RECIPES_DIR, Macro, Reference, Setting, Settings, values_in

ROOT = Path(__file__).resolve().parents[1]
DOCS_DIR = ROOT / "docs"
RECORDS = ("reference", "results", "results.md")
MOST_WORDS = 32_000
MARK = re.compile(r"^<!-- made of code: (\w+) -->$", re.MULTILINE)
GAP = "…"
"""Stands in a message for what differs from call to call."""
FIRST_SENTENCE = re.compile(r"(.*?(?:\w\w\w|\)|\"))\.(?: [A-Z]|$)")
PARTS = {"embedder": "embeddings of tokens", "encoder": "encoder", "projection": "projection"}
ROOMS = {
    "arguments.py": "Commands",
    "buckets": "Files and folders",
    "command.py": "Commands",
    "cli.py": "Commands",
    "configurables.py": "Recipes",
    "data": "Training data",
    "data/expansion": "Document expansion",
    "data/negatives": "Hard negatives",
    "demo": "Search",
    "server.py": "Models in Python",
    "documents.py": "Training data",
    "engine.py": "Devices and training runs",
    "doc2query": "Query generators",
    "evaluation": "Evaluation",
    "files": "Files and folders",
    "flags.py": "Commands",
    "gin_settings.py": "Recipes",
    "interop": "Models of other libraries",
    "losses": "Losses",
    "mine.py": "Hard negatives",
    "mining": "Hard negatives",
    "optim.py": "Devices and training runs",
    "model.py": "Models in Python",
    "models": "Encoders and towers",
    "mteb.py": "Evaluation",
    "planner.py": "Devices and training runs",
    "recipe.py": "Recipes",
    "recipe_checks.py": "Recipes",
    "reports": "Reports",
    "retrieval": "Search",
    "retrieval/expanded_search.py": "Document expansion",
    "scoring.py": "Models in Python",
    "settings.py": "Recipes",
    "tasks": "seqio tasks",
    "tools": "Commands",
    "trainer.py": "Devices and training runs",
    "training": "Devices and training runs",
    "training/run/recipe_file.py": "Recipes",
    "lightening.py": "Models in Python",
    "trials.py": "Models in Python",
    "tuning.py": "Models in Python",
    "types.py": "Installation",
}
"""The topic of the messages of a file or folder."""


class Message(NamedTuple):
    """A sentence that a user can read on stderr."""

    text: str  # with `GAP`s
    room: str  # a value of `ROOMS`

    @property
    def num_letters(self) -> int:
        """Letters outside the gaps: a sentence of few matches any other."""
        return sum(map(str.isalpha, self.text))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces each mark by its table or list; MkDocs calls this for every page."""
    return MARK.sub(lambda match: "\n".join(MAKERS[match[1]]()), markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Writes llms.txt, a list of the pages for programs that read the site, and prints how many words the guides have."""
    site, base = Path(config["site_dir"]), (config["site_url"] or "").rstrip("/")
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section, pages in _sections(config["nav"]):
        lines += ["", f"## {section}", ""]
        for title, page in pages:
            address = page.removesuffix(".md") + ".html"
            lines.append(f"- [{title}]({f'{base}/{address}' if base else address})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"words of the guides: {words_of_guides():,}, at most {MOST_WORDS:,}", file=sys.stderr)


def _sections(nav: list[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for ((title, inside),) in (entry.items() for entry in nav):
        yield title, list(_pages(title, inside))


def _pages(title: str, inside: Any) -> Iterator[tuple[str, str]]:
    if isinstance(inside, str):
        yield title, inside
        return
    for ((name, deeper),) in (entry.items() for entry in inside):
        yield from _pages(name, deeper)


def words_of_guides() -> int:
    """Words of all pages, code included, without the reference, recorded results, and what the build makes of the code."""
    pages = [page for page in DOCS_DIR.rglob("*.md") if page.relative_to(DOCS_DIR).parts[0] not in RECORDS]
    return sum(len(MARK.sub("", page.read_text(encoding="utf-8")).split()) for page in pages)


def recipes() -> Iterator[str]:
    """A table of the recipes, and each one's file; those of the papers have a page of their own."""
    files = sorted((RECIPES_DIR / "recipes").glob("*.gin"))
    yield from ("| recipe | purpose | loss | shared by the towers | steps | starts from |", "|---|---|---|---|---|---|")
    for file in files:
        settings = gin_settings.read([f"recipes/{file.name}"])
        cells = (
            _purpose(file),
            _loss(settings),
            _shared(settings),
            str(_value(settings, "Optimization", "num_steps")),
            _start(settings),
        )
        yield f"| [`{file.stem}`](#{file.stem}) | {' | '.join(cells)} |"
    yield from ("", "## The files", "")
    for file in files:
        yield from (f"### {file.stem}", "", "```gin", file.read_text(encoding="utf-8").rstrip(), "```", "")


def exit_codes() -> Iterator[str]:
    """A table of how a command can end, by the constants of `de_jax.command` and their docstrings."""
    body = ast.parse(Path(command.__file__).read_text(encoding="utf-8")).body
    yield from ("| code | meaning |", "|---|---|", "| 0 | The output is complete. |")
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and str(name := getattr(node.targets[0], "id", "")).startswith("EXIT_"):
            yield f"| {getattr(command, name)} | {ast.literal_eval(after.value)} |"  # type: ignore[attr-defined]


def messages() -> Iterator[str]:
    """Every sentence of an `InputError`, by topic."""
    by_room: dict[str, set[str]] = {}
    for message in all_messages():
        by_room.setdefault(message.room, set()).add(message.text)
    for room in sorted(by_room):
        yield from ("", f"## {room}", "")
        yield from (f"- `{text.replace('`', chr(39))}`" for text in sorted(by_room[room], key=str.lower))


def commands() -> Iterator[str]:
    """The verbs of `de-jax` by group, each with the first part of its `--help`."""
    for group, of_module in cli.GROUPS.items():
        yield from ("", f"## {group}", "", "| command | purpose |", "|---|---|")
        known = {verb: cli.command_of(verb) for verbs in of_module.values() for verb in verbs}
        yield from (f"| [`{verb}`](#{verb.replace(' ', '-')}) | {one.summary} |" for verb, one in known.items())
        for verb, one in known.items():
            yield from ("", f"### {verb}", "", "```text", one.parser.description or "", "```")


def old_commands() -> Iterator[str]:
    """A table of the names that commands had before."""
    yield from ("| old | new |", "|---|---|")
    yield from (f"| `{old}` | `{new}` |" for old, new in sorted(cli.ALIASES.items()))


MAKERS: dict[str, Callable[[], Iterator[str]]] = {
    maker.__name__: maker for maker in (recipes, exit_codes, messages, commands, old_commands)
}


@functools.cache
def all_messages() -> tuple[Message, ...]:
    """The sentences that are written where an `InputError` is made; sentences that are put together elsewhere are left out."""
    files = [file for folder in ("de_jax", "tools", "tasks") for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(message for file in files for message in _messages_in(file))


def _messages_in(file: Path) -> Iterator[Message]:
    folder, *rest = file.relative_to(ROOT).parts
    source = file.read_text(encoding="utf-8")
    if "InputError(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError" and node.args:
            room = ROOMS.get("/".join(rest[:2])) or ROOMS[rest[0] if folder == "de_jax" else folder]
            message = Message(_template(node.args[0]), room)
            if message.num_letters and " " in message.text:
                yield message


def _template(node: ast.expr) -> str:
    """A literal or f-string, with gaps for its values; "" for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return ""


def _purpose(file: Path) -> str:
    """The first sentence of a recipe's comment."""
    lines = [line.removeprefix("# ") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    match = FIRST_SENTENCE.match(" ".join(lines))
    assert match, f"{file.name} does not begin with a sentence"
    return match[1].replace("|", "\\|")


def _value(settings: Settings, name: str, parameter: str) -> Any:
    """The value of a setting without a scope, macros resolved; None if the recipe does not set it."""
    bound = settings.get(Setting("", name, parameter))
    value = bound.value if bound else None
    while isinstance(value, Macro):
        value = settings[Setting("", value.name)].value
    return value


def _loss(settings: Settings) -> str:
    loss = _value(settings, "Recipe", "loss")
    if loss is None:  # of a language model
        return f"`{_value(settings, 'Pretraining', 'data').name}`"
    inner = (_value(settings, loss.name, parameter) for parameter in ("losses", "loss"))
    names = [part.name for value in inner for part in values_in(value) if isinstance(part, Reference)]
    return f"`{loss.name}`" + (f" of {', '.join(f'`{name}`' for name in names)}" if names else "")


def _shared(settings: Settings) -> str:
    shared = _value(settings, "DualEncoder", "shared")
    if _value(settings, "Recipe", "loss") is None:
        return "no towers"
    if isinstance(shared, Reference):
        return "what MODEL shares"
    return "everything" if shared is None else ", ".join(PARTS[part] for part in shared) or "nothing"


def _start(settings: Settings) -> str:
    bound = settings.get(Setting("", "Initialization", "init_from"))
    if bound is None:
        return "random parameters"
    sources = bound.value.values() if isinstance(bound.value, dict) else [bound.value]
    return ", ".join(f"`{one.name if isinstance(one, Macro) else one}`" for one in sources)
