"""Timings and memory: each program prints one JSON line with the machine and versions. Scores of runs are in `experiments/`."""
