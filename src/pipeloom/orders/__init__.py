"""Orders of a run's compute actions for its own seconds: the search of one, and a lower bound of all."""
