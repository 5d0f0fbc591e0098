"""The demo's page, in Gradio; `side_by_side` makes its data and `markup` its HTML."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from de_jax.demo import markup
from de_jax.demo.side_by_side import MAX_QUERY_CHARACTERS, MAX_RESULTS, USUAL_RESULTS, SideBySide, open_corpus
from de_jax.model import Model, load
from de_jax.retrieval.searcher import printable
from de_jax.settings import needs
from de_jax.types import Backend, InputError


def page(
    run_dir: str | Path,
    dataset_dir: str | Path,
    *,
    compare: str | Path | None = None,
    step: int | str | None = None,
    compare_step: int | str | None = None,
    skip_empty: bool = False,
    backend: Backend = "jax",
) -> Any:
    """A page that searches a data set with BM25, a model, their fusion and a second model, as a `gradio.Blocks`.

    The first call for a model and a data set encodes the documents and keeps them. Gradio's analytics are off. The page's
    `.launch()` shows it below the cell of a notebook, and serves it on 127.0.0.1 elsewhere.

    Args:
        run_dir, compare: a run, a folder with a model, or a hub name, see `de_jax.load`; a second one has a column of its own.
        dataset_dir: a BEIR folder: the corpus, and queries for examples if there are any.
        step, compare_step: the checkpoint, where the model is a run: a step, or "best"; by default the newest.
        skip_empty: leave empty documents out, which are refused otherwise.
        backend: what encodes, see `de_jax.load`.

    Raises:
        InputError: Gradio is not installed, no such model or data set, or the same model twice.
    """
    gradio = import_gradio()
    corpus = open_corpus(dataset_dir, skip_empty=skip_empty)
    wanted = [(run_dir, step), *([(compare, compare_step)] if compare is not None else [])]
    loaded = [load(source, step=of_run, backend=backend) for source, of_run in wanted]
    sources = [str(source) for source, _ in wanted]
    names = _names(loaded, [os.path.basename(os.path.abspath(source)) for source in sources])
    if len(set(names)) < len(names):
        names = _names(loaded, sources)
    if len(set(names)) < len(names):
        raise InputError(f"{names[0]} is given twice; compare it with another model or step.")
    systems = SideBySide(corpus, dict(zip(names, loaded, strict=True)), skip_empty=skip_empty)
    return _blocks(gradio, systems, names)


def import_gradio() -> Any:
    """The module `gradio`; InputError names the extra if it is not installed."""
    with needs("demo", "the page"):
        import gradio
    return gradio


def serve(blocks: Any, *, host: str, port: int, share: bool) -> str:
    """Serves a page in the background; returns its address, with `share` the public one, or InputError if none was made."""
    with contextlib.redirect_stdout(sys.stderr):  # Gradio prints
        _, local_url, share_url = blocks.launch(
            server_name=host,
            server_port=port,
            share=share,
            inline=False,
            quiet=True,
            prevent_thread_lock=True,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            max_file_size="1kb",
            theme=import_gradio().themes.Default(primary_hue="indigo", font=["system-ui", "sans-serif"]),
        )
    if share and not share_url:
        blocks.close()
        raise InputError("Gradio's servers gave no public address; check the network, or leave --share out.")
    return str(share_url or local_url)


def answers(systems: SideBySide, query: str, k: float) -> Iterator[str]:
    """HTML for a query: the results, then the same results with their marks. After an `InputError`, the error's message."""
    try:
        columns = systems.search(query, k)
        yield markup.results(columns)
        yield markup.results(systems.marked(query, columns))
    except InputError as error:
        yield markup.error(str(error))


def _blocks(gradio: Any, systems: SideBySide, names: list[str]) -> Any:
    corpus = systems.corpus

    def answer(query: str, k: float) -> Iterator[str]:
        yield from answers(systems, query, k)

    with gradio.Blocks(title="de_jax: try a model", analytics_enabled=False, fill_width=True) as blocks:
        gradio.HTML(markup.headline(corpus.name, len(corpus.texts), names), apply_default_css=False)
        with gradio.Row(equal_height=True):
            query = gradio.Textbox(
                label="Query",
                placeholder="Type a query",
                show_label=False,
                container=False,
                max_lines=1,
                max_length=MAX_QUERY_CHARACTERS,
                autofocus=True,
                scale=6,
                min_width=220,
                elem_id="query",
            )
            button = gradio.Button("Search", variant="primary", scale=1, min_width=100, elem_id="search")
        with gradio.Row(equal_height=True):
            examples = gradio.Dataset(
                components=[gradio.Textbox(visible=False)],
                samples=[[printable(example)] for example in corpus.examples],
                label="Queries of the data set",
                type="index",
                visible=bool(corpus.examples),
                elem_id="examples",
                scale=5,
                min_width=300,
            )
            k = gradio.Slider(1, MAX_RESULTS, value=USUAL_RESULTS, step=1, label="Results", scale=1, min_width=200, elem_id="k")
        found = gradio.HTML(apply_default_css=False, elem_id="results")
        options = {
            "fn": answer,
            "inputs": [query, k],
            "outputs": found,
            "api_visibility": "private",
            "show_progress": "full",  # a spinner until the results
            "trigger_mode": "always_last",  # a search during another one, or while its words are marked, comes after it
        }
        examples_at = lambda place: "".join(one for number, one in enumerate(corpus.examples) if number == place)  # noqa: E731
        chosen = examples.click(examples_at, examples, query, api_visibility="private")
        for event in (button.click, query.submit, chosen.then):
            event(**options)
    blocks.preprocess_data = _refusing(gradio, blocks.preprocess_data)
    blocks.queue(max_size=16, default_concurrency_limit=1, api_open=False)  # requests that wait; more are refused
    return blocks


def _refusing(gradio: Any, preprocess_data: Any) -> Any:
    """Gradio's reader of a request, which answers values of a wrong type with a sentence and writes no traceback to the log."""

    async def preprocess(*args: Any, **options: Any) -> Any:
        try:
            return await preprocess_data(*args, **options)
        except Exception:
            sentence = f"the request is wrong; send a query and a number of results from 1 to {MAX_RESULTS}."
            raise gradio.Error(sentence, print_exception=False) from None

    return preprocess


def _names(models: Sequence[Model], sources: Sequence[str]) -> list[str]:
    """How columns name models."""
    named = zip(models, sources, strict=True)
    return [source if model.run.source else f"{source}, step {model.run.step}" for model, source in named]
