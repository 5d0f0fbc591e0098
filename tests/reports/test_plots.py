import json

import numpy as np
import pytest

from de_jax.reports import plots
from de_jax.types import InputError

RECORDS = [
    {"step": step, "loss": 5 / step, "learning_rate": 1e-3, "pairs_per_second": 100.0, "grad_norm": 1.0} for step in range(1, 80)
] + [{"step": 40, "dev/ndcg@10": 0.3, "dev/mrr@10": 0.2}, {"step": 80, "dev/ndcg@10": 0.4, "dev/mrr@10": 0.3}]


def write_lines(path, records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def image(path):
    from matplotlib.image import imread

    return imread(path)


def share_of(pixels, colour):
    """Share of the pixels that have about this colour."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float(np.mean(np.abs(pixels[..., :3] - rgb).max(axis=-1) < 0.1))


def pairs(num_pairs=60, dim=8):
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((num_pairs, dim)).astype(np.float32)
    return queries, queries + 0.1 * rng.standard_normal((num_pairs, dim)).astype(np.float32)


def test_training_curves_draw_four_panels(tmp_path, monkeypatch):
    drawn = []
    draw = plots._draw_panel
    monkeypatch.setattr(
        plots, "_draw_panel", lambda axis, name, unit, series: (drawn.append((name, [*series])), draw(axis, name, unit, series))
    )
    plots.training_curves(write_lines(tmp_path / "metrics.jsonl", RECORDS), tmp_path / "curves.png", title="a run")
    assert drawn == [
        ("Loss", ["loss"]),
        ("Development set", ["dev/mrr@10", "dev/ndcg@10"]),
        ("Learning rate", ["learning_rate"]),
        ("Speed", ["pairs_per_second"]),
    ]
    pixels = image(tmp_path / "curves.png")
    assert pixels.shape[1] > pixels.shape[0] > 500
    assert share_of(pixels, plots.DOC_COLOUR) > 0.002


def test_gradient_norms_have_a_panel_where_they_were_logged_by_group(tmp_path):
    records = [record | {"grad_norm/top": 2.0, "grad_norm/bottom": 1.0} for record in RECORDS]
    for name, drawn in (("four", RECORDS), ("five", records)):
        plots.training_curves(write_lines(tmp_path / "m.jsonl", drawn), tmp_path / f"{name}.png")
    assert image(tmp_path / "four.png").shape[0] < image(tmp_path / "five.png").shape[0]


def test_training_curves_leave_out_what_was_not_logged(tmp_path):
    plots.training_curves(write_lines(tmp_path / "m.jsonl", [{"step": 1, "loss": 2.0}]), tmp_path / "one.png")
    plots.training_curves(write_lines(tmp_path / "m.jsonl", RECORDS), tmp_path / "four.png")
    assert image(tmp_path / "one.png").shape[0] < image(tmp_path / "four.png").shape[0]


def test_a_line_cut_off_at_the_end_is_passed_over_and_one_before_is_named_in_a_warning(tmp_path):
    plots.training_curves(write_lines(tmp_path / "m.jsonl", RECORDS, tail='{"step": 9'), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    write_lines(tmp_path / "m.jsonl", RECORDS[:1], tail='{"step": 9\n{"step": 3, "loss": 1}\n')
    with pytest.warns(UserWarning, match=r"m\.jsonl, line 2: damaged, so it is left out"):
        assert plots._read_series(tmp_path / "m.jsonl") == {"loss": ([1, 3], [5.0, 1])} | {
            name: ([1], [RECORDS[0][name]]) for name in ("learning_rate", "pairs_per_second", "grad_norm")
        }


def test_a_log_with_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a training log"):
        plots.training_curves(write_lines(tmp_path / "m.jsonl", [{"step": 1, "other": 1.0}]), tmp_path / "curves.png")
    with pytest.raises(InputError, match="does not exist"):
        plots.training_curves(tmp_path / "absent.jsonl", tmp_path / "curves.png")


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_embedding_map_shows_both_towers_and_repeats_itself(tmp_path, method):
    for name in ("first.png", "second.png"):
        plots.embedding_map(*pairs(), tmp_path / name, title="Both towers", method=method, seed=3, max_pairs=40)
    pixels = image(tmp_path / "first.png")
    assert share_of(pixels, plots.QUERY_COLOUR) > 0.001
    np.testing.assert_array_equal(pixels, image(tmp_path / "second.png"))


def test_embedding_map_draws_lines_between_matching_rows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_draw_map", lambda figure, queries, docs, title, note: drawn.append((queries, docs, note)))
    queries, docs = pairs(50, 4)
    plots.embedding_map(queries, docs, tmp_path / "map.png", title="", method="pca", max_pairs=20)
    places_of_queries, places_of_docs, note = drawn[0]
    assert places_of_queries.shape == places_of_docs.shape == (20, 2)
    assert note.startswith("20 pairs, PCA")
    own = np.linalg.norm(places_of_queries - places_of_docs, axis=1).mean()
    other = np.linalg.norm(places_of_queries - places_of_docs[::-1], axis=1).mean()
    assert own < 0.3 * other


def test_collapsed_embeddings_still_make_a_map(tmp_path):
    rows = np.ones((10, 4), np.float32)
    plots.embedding_map(rows, rows, tmp_path / "map.png", title="Collapsed")
    assert (tmp_path / "map.png").exists()


def test_embedding_map_refuses_bad_input(tmp_path):
    queries, docs = pairs()
    with pytest.raises(InputError, match="row i is pair i"):
        plots.embedding_map(queries, docs[:-1], tmp_path / "map.png", title="")
    with pytest.raises(InputError, match="method 'umap' is unknown"):
        plots.embedding_map(queries, docs, tmp_path / "map.png", title="", method="umap")
    with pytest.raises(InputError, match="2 pairs are too few for a map"):
        plots.embedding_map(queries[:2], docs[:2], tmp_path / "map.png", title="")
    docs[5, 1] = np.nan
    with pytest.raises(InputError, match="not finite"):
        plots.embedding_map(queries, docs, tmp_path / "map.png", title="")


def test_differences_are_drawn_in_a_panel_a_system(tmp_path):
    rng = np.random.default_rng(0)
    gains = {"better": rng.normal(0.1, 0.2, 50), "worse": rng.normal(-0.2, 0.1, 50)}
    plots.query_differences(gains, tmp_path / "both.png", title="nDCG@10: gain over BM25")
    plots.query_differences({"better": np.abs(gains["better"])}, tmp_path / "one.png", title="gain")
    pixels = image(tmp_path / "both.png")
    assert share_of(pixels, plots.DOC_COLOUR) > 0.01
    assert share_of(pixels, plots.QUERY_COLOUR) > 0.01
    assert share_of(image(tmp_path / "one.png"), plots.QUERY_COLOUR) == 0
    assert image(tmp_path / "one.png").shape[0] < pixels.shape[0]
    with pytest.raises(InputError, match="no difference to draw"):
        plots.query_differences({}, tmp_path / "none.png", title="")


def test_every_picture_has_a_white_ground_few_colours_and_our_line_colours(tmp_path):
    from PIL import Image

    with plots.new_figure(tmp_path / "lines.png", figsize=(plots.WIDE, 3.0), title="two lines") as figure:
        axis = figure.subplots()
        axis.plot([0, 1], [0, 1], lw=6)
        axis.plot([0, 1], [1, 0], lw=6)
    with Image.open(tmp_path / "lines.png") as picture:
        assert (picture.mode, picture.width) == ("P", 1500)
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert min(share_of(image(tmp_path / "lines.png"), colour) for colour in plots.COLOURS[:2]) > 0.01
