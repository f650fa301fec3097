"""Loops over arrays of actions. Plain functions that ``pipeloom.schedule.compiled`` may hand to a compiler.

Each takes numbers and arrays, and calls only functions of its own module; ``waits`` has the codes of kinds. The *node*
of an action is its index in the concatenated rows. -1 means "none".
"""
