"""What a step of a described run will take and hold: quickly for searches and tables, or with its whole trace."""
