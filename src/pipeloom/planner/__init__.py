"""Decisions: which layout is fastest, and why."""
