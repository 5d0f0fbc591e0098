"""Experiments behind the tables and pictures of docs/results.md: each trains or scores runs and compares their quality.

A program belongs here where its result is a score or a picture; where it is a time or memory, it belongs in `benchmarks/`.
"""
