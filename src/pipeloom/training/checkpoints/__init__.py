"""Checkpoints are written and read here, with torch."""
