"""Prediction of the time and memory of a run's step, by simulating its schedule."""
