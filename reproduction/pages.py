"""Reports as one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #2b2d33; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: .9rem; }
tr { border-bottom: 1px solid #e4e6ea; }
th { padding: .2rem .9rem .2rem 0; vertical-align: bottom; text-align: right; font-weight: 600; }
th:first-child { text-align: left; }
td { padding: .2rem .9rem .2rem 0; vertical-align: top; }
td.value { font-variant-numeric: tabular-nums; text-align: right; }
td.note { color: #6a6f77; }
figure { margin: 1.6rem 0; }
img { max-width: 100%; height: auto; }
figcaption { font-size: .9rem; color: #4a4e55; }
"""
NOTES = {
    "ndcg@10": "over all documents, and of judged documents over all queries",
    "alignment": "mean squared distance of a query and its document, 0 (equal) to 4 (Wang and Isola 2020)",
    "uniformity": "log of the mean potential of all pairs, 0 (collapsed) to about -4 (even)",
    "effective_rank": "dimensions that carry the spread (Roy and Vetterli 2007)",
    "distances": "cosine distances of pairs",
    "cosine_of_top_document": "of each query and its best-ranked document",
    "cosine_of_relevant_document": "of each query and its relevant document",
    "similarity_ratio": "s(q, q') / s(q, p') of random others; 1 where both towers share one space",
    "retrieved": "share of different documents among the first ones of all queries, and of the collection that is ever among them",
}


class Picture(NamedTuple):
    """A picture's file, and its description."""

    file: str
    caption: str


def write_page(out_html: Path, title: str, sections: Mapping[str, str], pictures: Sequence[Picture]) -> None:
    """Writes a report: HTML by headline ("" has none), then the pictures, which are read from its folder."""
    figures = "".join(_figure(out_html.parent / picture.file, picture.caption) for picture in pictures)
    body = [f"<h1>{html.escape(title)}</h1>"]
    for headline, section in {**sections, "Pictures": figures}.items():
        body += [f"<h2>{html.escape(headline)}</h2>"] * bool(headline) + [section]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    out_html.write_text(f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n')


def html_facts(numbers: Mapping[str, Any]) -> str:
    """A table of values by name, with their notes of `NOTES`; the name of a nested value follows the name of its group."""
    return f"<table>{''.join(_rows(numbers))}</table>"


def html_columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with a head; the first column is words."""
    cells = [f"<th>{html.escape(name)}</th>" for name in head]
    lines = [[f"<td>{html.escape(str(first))}</td>", *(_value(value) for value in values)] for first, *values in rows]
    return "".join(["<table>", *(f"<tr>{''.join(line)}</tr>" for line in (cells, *lines)), "</table>"])


def _rows(numbers: Mapping[str, Any], above: str = "", note: str = "") -> Iterator[str]:
    for name, value in numbers.items():
        label = f"{above} {name}".strip().replace("_", " ")
        own_note = note or NOTES.get(name, "")
        if isinstance(value, Mapping):
            yield from _rows(value, label, own_note)
            note = "" if not above else note
        else:
            yield f"<tr><td>{html.escape(label)}</td>{_value(value)}<td class=note>{html.escape(own_note)}</td></tr>"
            note = ""


def _value(value: Any) -> str:
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"<td class=value>{html.escape(shown)}</td>"


def _figure(png: Path, caption: str) -> str:
    data = base64.b64encode(png.read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img src="data:image/png;base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'
