"""Loops over arrays of actions. Plain functions that ``pipeloom.schedule.compiled`` may hand to a compiler.

Each takes numbers and arrays, and calls functions and uses constants of its own module alone; a constant may be made
from another module's, such as the code of a kind. Actions are named by their *node*: their number in the rows, joined.
-1 stands for "none".
"""
