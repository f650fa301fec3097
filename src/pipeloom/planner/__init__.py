"""Decisions: which layers go into which stage."""
