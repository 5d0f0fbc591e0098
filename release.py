"""Prepares a release: fills addresses in, builds, checks, and prints the steps that are left for a person.

python -m release --repository=https://github.com/OWNER/de_jax --docs=https://OWNER.github.io/de_jax
python -m release --all_tests        # without addresses everything builds too; with the sdist's whole test suite

Needs `pip install -e '.[release]'`. Both addresses are written to `[project.urls]` of pyproject.toml, mkdocs.yml, CITATION.cff and
the notebooks' badges, once; a second call reads them there. The distributions lie in dist/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
from pathlib import Path

import de_jax
from de_jax.types import DISTRIBUTION, InputError

ROOT = Path(__file__).resolve().parent
TAG = f"v{de_jax.__version__}"
BEGIN, END = "# begin: filled in by `python -m release`", "# end"
"""Lines between which addresses stand in pyproject.toml, mkdocs.yml and CITATION.cff."""
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)\s]+)(?=\))")
SMOKE = ("tests/losses", "tests/test_settings.py", "tests/test_cli.py", "tests/test_extras.py")
"""Tests of the sdist that run each time, minutes less than all of them."""
GITHUB = "https://github.com/"
SECONDS_TO_START = 300
"""For README's server to answer."""
TABLE = """
import csv
from de_jax.data.text import beir
data = beir.read("../elsewhere/runs/quickstart/pydocs", "test")
docs = dict(zip(data.docs.ids, data.docs.texts))
rows = [(query, docs[min(data.qrels[query_id])]) for query_id, query in zip(data.queries.ids, data.queries.texts)]
csv.writer(open("qa.csv", "w")).writerows([("question", "answer"), *rows[:200]])
"""
"""Writes README's qa.csv from the questions of the quickstart."""
BADGE = re.compile(r"\n*\[!\[Open in Colab\][^\n]*")


def fill(root: Path, repository: str, docs: str) -> None:
    """Writes both addresses wherever the tree has them; no other place names one."""
    urls = [f'Repository = "{repository}"', f'Changelog = "{repository}/blob/main/CHANGELOG.md"']
    _between(root / "pyproject.toml", [*urls, f'Documentation = "{docs}"'] if docs else urls)
    _between(root / "mkdocs.yml", [f"repo_url: {repository}", *([f"site_url: {docs}/"] if docs else [])])
    _between(root / "CITATION.cff", [f"repository-code: {repository}", *([f"url: {docs}"] if docs else [])])
    is_github, place = repository.startswith(GITHUB), repository.removeprefix(GITHUB)
    for path in sorted((root / "demos").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        first = notebook["cells"][0]
        badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        badge += f"(https://colab.research.google.com/github/{place}/blob/main/demos/{path.name})"
        text = BADGE.sub("", "".join(first["source"])).rstrip() + (f"\n\n{badge}" if is_github else "")  # Colab opens GitHub alone
        first["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _between(path: Path, lines: list[str]) -> None:
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{path} has no lines '{BEGIN}' and '{END}'; put both where the addresses belong.")
    path.write_text("\n".join([before + begin, *lines, end]) + after, encoding="utf-8")


def addresses(root: Path) -> tuple[str, str]:
    """The repository and the site that pyproject.toml names, "" for none."""
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return urls.get("Repository", ""), urls.get("Documentation", "")


def absolute(readme: str, repository: str) -> str:
    """README as the package index shows it: links and pictures by address."""
    raw = repository.replace(GITHUB, "https://raw.githubusercontent.com/") if repository.startswith(GITHUB) else f"{repository}/raw"

    def address(match: re.Match[str]) -> str:
        is_picture = match[1].endswith((".png", ".svg"))
        return f"{raw}/{TAG}/{match[1]}" if is_picture else f"{repository}/blob/{TAG}/{match[1]}"

    return LINK.sub(address, readme)


def relative_links(readme: str) -> list[str]:
    """The links of the rendered README that lead nowhere on a package index."""
    from readme_renderer import markdown

    html = markdown.render(readme)
    if html is None:
        raise InputError("README.md cannot be rendered; pip install 'readme_renderer[md]'.")
    return [link for link in re.findall(r'(?:href|src)="([^"]*)"', html) if not re.match(r"https?://|#|mailto:", link)]


def build(work: Path, repository: str) -> list[Path]:
    """An sdist and a wheel in dist/, from the tracked files alone."""
    source = work / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    if repository:
        path = source / "README.md"
        path.write_text(absolute(path.read_text(encoding="utf-8"), repository), encoding="utf-8")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", dist, source)
    built = sorted(dist.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *built)
    return built


def try_wheel(work: Path, wheel: Path) -> None:
    """Installs the wheel alone and runs every verb, the quickstart, a search and all exports with it."""
    python = _environment(work / "wheel", f"{wheel}[transformers,serve]")
    _run(python, ROOT / "tests" / "installed_wheel.py", cwd=_folder(work / "elsewhere"), env=_alone(work))


def try_sdist(work: Path, sdist: Path, all_tests: bool) -> None:
    """Installs the sdist with what its tests need, and runs them from it."""
    shutil.unpack_archive(sdist, work / "sdist", filter="data")
    (folder,) = (work / "sdist").iterdir()
    python = _environment(work / "from_sdist", "-e", f"{folder}[test]")
    _run(python, "-m", "pytest", "-q", "-n", "0", *(() if all_tests else SMOKE), cwd=folder, env=_alone(work))


def try_readme(work: Path, model: str) -> None:
    """Runs README from top to bottom with the installed wheel: its Python, its commands of `de-jax`, and a request to its server.

    `qa.csv` is made of the quickstart's questions; the number of updates is 2. Prints the seconds of each.
    """
    place, python = _folder(work / "readme"), work / "wheel" / "bin" / "python"
    _run(python, "-c", TABLE, cwd=place, env=_alone(work))
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("all-MiniLM-L6-v2", model)
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            _run(python, "-c", block, cwd=place, env=_alone(work))
            continue
        for line in block.splitlines():
            if line.startswith("de-jax "):
                _, *words = shlex.split(line, comments=True)
                short = ["--num_steps=2", "--batch_size=8"] if words[0] == "fine_tune" else []
                start = _ask_server if words[0] == "serve" else _run
                start(python.parent / "de-jax", *words, *short, cwd=place, env=_alone(work))


def left_to_do(repository: str, docs: str, built: list[Path]) -> str:
    """The steps that need a person's rights, in order."""
    steps = []
    if not repository or not docs:
        steps.append("give --repository=<address> and --docs=<address> once; README on the index has relative links without them")
    steps += [
        f"look at `git diff`, set the date of {de_jax.__version__} in CHANGELOG.md and CITATION.cff, and commit",
        f"register {DISTRIBUTION} on the package index with a trusted publisher: workflow publish.yml, environment pypi",
        f"git tag {TAG} && git push origin main {TAG}; the workflow publishes what is tagged",
        f"or without the workflow: python -m twine upload {' '.join(str(path.relative_to(ROOT)) for path in built)}",
        "turn on the site (pages from the workflow) and private reports of vulnerabilities",
        f"in a fresh environment: pip install {DISTRIBUTION} && de-jax doctor",
    ]
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default="", help="address of the public repository, https://...")
    parser.add_argument("--docs", default="", help="address of the site, https://...")
    parser.add_argument("--all_tests", action="store_true", help="run all tests of the sdist, not a few")
    parser.add_argument(
        "--model", default="all-MiniLM-L6-v2", help="a folder in place of README's model, for a machine without a hub"
    )
    parser.add_argument("--no_install", action="store_true", help="build and check only")
    args = parser.parse_args(argv)
    for name in ("repository", "docs"):
        if (address := getattr(args, name)) and not address.startswith("https://"):
            parser.error(f"--{name} is {address}; it must begin with https://")
    if args.repository:
        fill(ROOT, args.repository.rstrip("/"), args.docs.rstrip("/"))
    repository, docs = addresses(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        built = build(work, repository)
        sdist, wheel = sorted(built, key=lambda path: path.suffix == ".whl")
        readme = (work / "source" / "README.md").read_text(encoding="utf-8")
        if repository and (links := relative_links(readme)):
            raise InputError(f"README has relative links after rendering: {', '.join(links)}; write them as [text](path).")
        if not args.no_install:
            try_wheel(work, wheel)
            try_readme(work, args.model)
            try_sdist(work, sdist, args.all_tests)
    print(f"\n{', '.join(path.name for path in built)} are in dist/. Left to do:\n{left_to_do(repository, docs, built)}")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _alone(work: Path) -> dict[str, str]:
    """An environment of processes that sees no other installation."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"PYTHONNOUSERSITE": "1", "DE_JAX_CACHE": str(work / "cache"), "JAX_PLATFORMS": "cpu"}


def _environment(folder: Path, *packages: str) -> Path:
    """The Python of a fresh environment with these packages."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *packages)
    return python


def _run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    print("$", *command, flush=True)
    start = time.monotonic()
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


def _ask_server(*command: object, cwd: Path, env: dict[str, str]) -> None:
    """Starts the server, asks it for one embedding, and ends it."""
    print("$", *command, flush=True)
    start = time.monotonic()
    server = subprocess.Popen([str(part) for part in command], cwd=cwd, env=env)
    body = json.dumps({"model": "query", "input": "how do I open a file?"}).encode()
    request = urllib.request.Request("http://127.0.0.1:8000/v1/embeddings", body, {"Content-Type": "application/json"})
    try:
        while True:
            try:
                with urllib.request.urlopen(request) as answer:
                    found = json.load(answer)["data"][0]["embedding"]
                break
            except urllib.error.URLError:
                if server.poll() is not None or time.monotonic() - start > SECONDS_TO_START:
                    raise InputError("the server of README gave no embedding.") from None
                time.sleep(0.5)
    finally:
        server.terminate()
        server.wait()
    print(f"  {time.monotonic() - start:.0f} s to a vector of {len(found)} numbers", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (InputError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
