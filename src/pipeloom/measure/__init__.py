"""Measures this machine for a cluster file, and the stages of a run for its prediction."""
