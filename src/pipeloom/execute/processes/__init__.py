"""The processes of a run: who they are, how they start and end, where each one stands."""
