"""The facts of the breadth-first paper (arXiv 2211.05953), reproduced by simulation; ``benchmarks/reproduce.py``."""
