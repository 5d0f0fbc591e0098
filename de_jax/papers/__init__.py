"""The tables of the papers: contents, needed data and models, and how the cells are trained, scored and filled."""
