"""Parts of the executor, one for each group of kinds of actions; protocol: ``part.Part``."""
