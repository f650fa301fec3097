"""The folder of a run: its names, how one begins, how one is read."""
