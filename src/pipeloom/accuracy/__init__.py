"""Comparison of predictions with published measurements, and calibration of training programs."""
