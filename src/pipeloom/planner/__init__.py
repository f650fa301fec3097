"""Decisions: which layers go into which stage, and which layout is fastest."""
