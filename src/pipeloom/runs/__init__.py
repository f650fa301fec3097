"""The folder of a run: file names, start of a run, reading."""
