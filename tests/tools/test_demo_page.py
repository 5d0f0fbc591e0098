"""The page to try a model, in a real browser: pip install -e '.[demo]' playwright, and a Chromium on the path."""

import json
import shutil
import socket
import time

import pytest

from de_jax.demo import gradio_page, page
from de_jax.demo.side_by_side import SideBySide

pytestmark = pytest.mark.soak
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script> ${alert(3)} {{constructor.constructor('alert(4)')()}} \"'>`x`"
URLS = ['https://example.org/?q="><script>alert(5)</script>', "javascript:alert(6)", ""]


@pytest.fixture(scope="module")
def address(trained, tmp_path_factory):
    """Where the page is served, of two models and of documents, queries and a folder that try to break out."""
    gradio = pytest.importorskip("gradio")
    folder = tmp_path_factory.mktemp("data") / "<img src=x onerror=alert(7)> ${alert(8)}"
    folder.mkdir()
    docs = [
        {"_id": f"d{i} {HOSTILE}", "title": HOSTILE, "text": f"the red fox {i} {HOSTILE} " * 20, "url": URLS[i % 3]}
        for i in range(30)
    ]
    for name, rows in {"corpus": docs, "queries": [{"_id": "q", "text": f"grey {HOSTILE}"}]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sent = []
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setattr(gradio.analytics, "_do_analytics_request", lambda *args: sent.append(args))
        patch.setattr(gradio.analytics, "version_check", lambda: sent.append("version"))
        blocks = page(trained, folder, compare=trained, compare_step=3)
        port = free.getsockname()[1]
        free.close()
        yield gradio_page.serve(blocks, host="127.0.0.1", port=port, share=False)
        blocks.close()
    assert sent == []


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium, "no Chromium on the path; apt-get install chromium"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[1280, 400])
def tab(browser, address, request):
    """A tab of this width; nothing may open a dialog, fail or be asked of another host."""
    tab, dialogs, hosts = browser.new_page(viewport={"width": request.param, "height": 900}), [], set()
    tab.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    tab.on("pageerror", lambda error: dialogs.append(str(error)))
    tab.on("request", lambda asked: hosts.add(asked.url.split("/")[2]))
    tab.set_default_timeout(120_000)
    tab.goto(address)
    tab.wait_for_selector("#query textarea, #query input")
    yield tab
    assert tab.evaluate("document.documentElement.scrollWidth") <= request.param
    assert dialogs == []
    assert {host for host in hosts if host} == {address.split("/")[2]}
    tab.close()


def search(tab, query, k=None):
    if k is not None:
        number = tab.locator("#k input[type=number]")
        number.fill(str(k))
        number.blur()
    tab.locator("#query textarea, #query input").first.fill(query)
    tab.locator("#search").click()


def hits(tab, column):
    return tab.locator(f".dj-columns > section:nth-child({column}) .dj-hit")


def test_a_query_gives_all_columns_and_hostile_documents_are_text(tab, tmp_path):
    search(tab, "red fox", 3)
    tab.wait_for_selector(".dj-columns > section:nth-child(4) mark")
    heads = tab.locator(".dj-head").all_inner_texts()
    assert [head.split()[0] for head in heads] == ["BM25", "Dense", "Fusion", "Dense"]
    assert all(head.endswith("ms") for head in heads)
    for column in (1, 2, 3, 4):
        assert hits(tab, column).count() == 3
        assert hits(tab, column).locator("mark").count() >= 3
        for text in hits(tab, column).all_inner_texts():
            assert text.count(HOSTILE) >= 2  # the id and the title
    assert tab.locator("#results :is(img, script, iframe)").count() == 0
    links = tab.locator("#results a").evaluate_all("links => links.map(link => link.href)")
    assert links
    assert {link.split("?")[0] for link in links} == {"https://example.org/"}
    assert "<img src=x onerror=alert(7)> ${alert(8)}" in tab.inner_text("h2")
    closed = hits(tab, 1).first.bounding_box()["height"]
    hits(tab, 1).first.locator("summary").click()
    assert hits(tab, 1).first.bounding_box()["height"] > closed
    tab.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_a_spinner_with_its_text_below_turns_until_the_results(tab, monkeypatch):
    at_once = SideBySide.search
    monkeypatch.setattr(SideBySide, "search", lambda *of: (time.sleep(2), at_once(*of))[1])
    search(tab, "red fox", 3)
    tab.wait_for_selector("#results .progress-text")
    spinner, text = (tab.locator(f"#results .wrap {part}").first.bounding_box() for part in ("svg", ".progress-text"))
    assert text["y"] >= spinner["y"] + spinner["height"] / 2
    tab.wait_for_selector(".dj-columns mark")
    assert not tab.locator("#results .progress-text").is_visible()


def test_inputs_are_bounded(tab):
    search(tab, "x" * 1000, 1000)
    assert len(tab.locator("#query textarea, #query input").first.input_value()) <= 300
    tab.wait_for_selector("#results .dj-columns, #results .dj-error, .toast-wrap *")
    assert hits(tab, 2).count() <= 20
    search(tab, "", 5)
    tab.wait_for_selector(".dj-error")
    assert tab.inner_text(".dj-error") == "the query is empty; give some words to search for."


def test_an_example_is_searched_at_a_click(tab):
    tab.locator("#examples button, #examples td").first.click()
    tab.wait_for_selector(".dj-columns mark")
    assert tab.locator("#query textarea, #query input").first.input_value() == f"grey {HOSTILE}"


def test_a_search_during_another_one_comes_after_it(tab):
    search(tab, "red fox", 20)
    search(tab, "")
    tab.wait_for_selector(".dj-error")
