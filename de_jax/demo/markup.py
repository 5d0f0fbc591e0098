"""Results as HTML. Every text of a corpus, a query or a file name goes through `escaped`, which leaves nothing to interpret."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from de_jax.demo.side_by_side import Column, Hit
from de_jax.retrieval.searcher import printable

MAX_SHOWN = 4000
"""Characters of a document that are shown."""
STYLE = """
.dj { font: 15px/1.45 system-ui, sans-serif; color: var(--body-text-color);
  --dj-soft: color-mix(in srgb, var(--body-text-color) 68%, transparent); }
.html-container:has(.dj) { padding: 0; }
#results { min-height: 140px; padding-top: 10px; } #results .progress-text { position: static; transform: none; order: 1; }
.dj h2 { font-size: 22px; font-weight: 600; margin: 0 0 2px; overflow-wrap: anywhere; }
.dj p { margin: 0; overflow-wrap: anywhere; }
.dj-columns { display: grid; gap: 24px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); }
.dj-columns > section { min-width: 0; }
.dj-head { display: flex; justify-content: space-between; align-items: baseline; gap: 8px;
  border-bottom: 2px solid var(--body-text-color); padding-bottom: 4px; }
.dj h3 { margin: 0; font-size: 17px; font-weight: 600; }
.dj-head span { font-variant-numeric: tabular-nums; white-space: nowrap; }
.dj .dj-about { color: var(--dj-soft); font-size: 13px; margin: 4px 0; min-height: 1.45em; }
.dj-hit { border-top: 1px solid var(--border-color-primary); padding: 8px 0; }
.dj-about + .dj-hit { border-top: none; }
.dj-facts { display: flex; gap: 10px; font-size: 13px; white-space: nowrap; color: var(--dj-soft);
  font-variant-numeric: tabular-nums; }
.dj-facts b { color: var(--body-text-color); font-weight: 600; }
.dj-facts .dj-id { margin-left: auto; min-width: 0; overflow: hidden; text-overflow: ellipsis; }
.dj summary { list-style: none; cursor: pointer; overflow-wrap: anywhere; }
.dj summary::-webkit-details-marker { display: none; }
.dj details:not([open]) .dj-text { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 6; overflow: hidden; }
.dj summary:hover .dj-text { background: var(--background-fill-secondary); }
.dj summary:focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }
.dj .dj-title { font-weight: 600; }
.dj mark { color: inherit; border-radius: 3px; padding: 0 1px; background: rgb(255 166 0 / var(--strength)); }
.dj a { color: var(--link-text-color); }
.dj .dj-note { color: var(--dj-soft); font-size: 13px; margin-top: 16px; max-width: 900px; }
.dj .dj-error { border-left: 4px solid #c62828; padding: 4px 12px; }
.dj .dj-empty { color: var(--dj-soft); padding: 8px 0; }
"""
NOTE = (
    "Click a text to read all of it. BM25 marks the words of the query. The other columns mark the words that matter most to the "
    "score of their model: gradient &times; input of the similarity with respect to the token embeddings, as its L2 norm. The "
    "deeper the color, the more a word matters; it may raise or lower the score. The fusion shows the marks of its dense model. "
    "Scores of different columns have different scales."
)
_CONTROLS_OF_TEMPLATES = str.maketrans({character: f"&#{ord(character)};" for character in "{}$`@"})


def escaped(text: str) -> str:
    """A text as HTML that shows it, on one line: no tag, attribute, template or control character of it has an effect.

    Example:
        >>> escaped("<b>\\n${x}")
        '&lt;b&gt; &#36;&#123;x&#125;'
    """
    return html.escape(printable(re.sub(r"\s+", " ", text))).translate(_CONTROLS_OF_TEMPLATES)


def link(url: str) -> str:
    """The address to link to: the url if it is one of http or https, else "".

    Example:
        >>> link("https://example.org/a"), link("javascript:alert(1)")
        ('https://example.org/a', '')
    """
    is_web = url.isprintable() and re.fullmatch(r"https?://[^\s/?#\[\]]+([/?#]\S*)?", url, re.IGNORECASE)
    return url if is_web else ""


def results(columns: Sequence[Column], note: str = NOTE) -> str:
    """The columns side by side, one below the other if there is no room; `note` is HTML below them."""
    shown = "".join(_column(column) for column in columns)
    return _inside(f'<div class="dj-columns">{shown}</div><p class="dj-note">{note}</p>')


def error(sentence: str) -> str:
    """A sentence in the place of results."""
    return _inside(f'<p class="dj-error" role="alert">{escaped(sentence)}</p>')


def headline(corpus: str, num_docs: int, systems: Sequence[str]) -> str:
    """The head of the page: the corpus, its size, and the models that rank it."""
    models = " and ".join(f"<b>{escaped(name)}</b>" for name in systems)
    return _inside(f"<h2>Search {escaped(corpus)}</h2><p>{num_docs:,} documents, ranked by BM25 and by {models}.</p>")


def _inside(content: str) -> str:
    return f"<style>{STYLE}</style><div class='dj'>{content}</div>"


def _column(column: Column) -> str:
    hits = "".join(_hit(rank, hit) for rank, hit in enumerate(column.hits, start=1))
    time = f"{column.milliseconds:,.{int(column.milliseconds < 10)}f} ms"
    found = hits or '<p class="dj-empty">No document has a word of the query.</p>'
    return (
        f'<section><div class="dj-head"><h3>{escaped(column.system)}</h3><span>{time}</span></div>'
        f'<p class="dj-about">{escaped(column.about)}</p>{found}</section>'
    )


def _hit(rank: int, hit: Hit) -> str:
    ranks = ", ".join(f"{escaped(system)} {place}" for system, place in hit.ranks.items())
    url = link(hit.url)
    doc_id = escaped(hit.doc_id)
    if url:
        doc_id = f'<a href="{html.escape(url)}" target="_blank" rel="noopener noreferrer nofollow">{doc_id}</a>'
    facts = f'<b>{rank}</b><span title="score">{hit.score:.4f}</span>' + (f"<span>{ranks}</span>" if ranks else "")
    return (
        f'<div class="dj-hit"><div class="dj-facts">{facts}<span class="dj-id" title="{escaped(hit.doc_id)}">{doc_id}</span></div>'
        f'<details><summary><div class="dj-text">{_text(hit)}</div></summary></details></div>'
    )


def _text(hit: Hit) -> str:
    """The title in bold and the text, marked."""
    length = len(hit.title) if hit.text.startswith(hit.title) else 0
    body = _marked(hit, length, min(len(hit.text), MAX_SHOWN)) + ("…" if len(hit.text) > MAX_SHOWN else "")
    return (f'<span class="dj-title">{_marked(hit, 0, length)}</span> ' if length else "") + body


def _marked(hit: Hit, begin: int, end: int) -> str:
    """A part of the text with its marks."""
    pieces, done = [], begin
    for mark in hit.marks:
        if begin <= mark.begin and mark.end <= end and mark.begin >= done:
            opening = f'<mark style="--strength:{0.6 * mark.strength:.2f}">'
            pieces += [escaped(hit.text[done : mark.begin]), opening, escaped(hit.text[mark.begin : mark.end]), "</mark>"]
            done = mark.end
    return "".join([*pieces, escaped(hit.text[done:end])])
