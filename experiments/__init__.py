"""Experiments behind the results in results/: each trains or scores runs and compares their quality.

A program belongs here where its result is a score or a picture; where it is a time or memory, it belongs in `benchmarks/`.
"""
