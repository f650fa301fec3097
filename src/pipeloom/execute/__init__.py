"""Executes schedules on torch: stages, transports and the interpreter of a rank's row."""
