"""Loops over arrays of actions. Plain functions that ``pipeloom.schedule.compiled`` may hand to a compiler.

Each takes numbers and arrays, and calls functions of its own module alone; codes of kinds come from ``waits``. Actions
are named by their *node*: their number in the rows, joined. -1 stands for "none".
"""
