"""Loops over arrays of actions. Plain functions that ``pipeloom.schedule.compiled`` may hand to a compiler.

Each takes numbers and arrays and calls only functions of its own module. Constants stand in each module, too: what is
compiled is kept on disk until the module's own file changes, so that a number from elsewhere could grow stale. Actions
are named by their *node*: their number in the rows, joined. -1 stands for "none".
"""
