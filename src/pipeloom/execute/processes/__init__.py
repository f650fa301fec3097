"""The processes of a run: start, rendezvous, signals, positions, end."""
