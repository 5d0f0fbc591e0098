"""A page to try models on: type a query, and see the results of BM25, of dense retrieval and of their fusion side by side.

from de_jax.demo import page

page("runs/sde", "data/beir/scifact").launch()  # in a notebook, also in Colab
"""

from de_jax.demo.gradio_page import page

__all__ = ["page"]
