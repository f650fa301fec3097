"""The cost model: time and memory of the actions of a schedule."""
