"""The tables of the papers: what stands in them, what they need, and how their cells are trained, scored and filled."""
