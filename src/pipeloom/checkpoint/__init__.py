"""The folder of a checkpoint, and which one a run goes on from; without torch."""
