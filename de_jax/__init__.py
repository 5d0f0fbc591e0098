"""Dual encoders for dense retrieval in JAX. Importing this package imports nothing else."""

__version__ = "0.1.0"
