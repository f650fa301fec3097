"""The folder of a checkpoint, and the choice of the one to resume from; without torch."""
