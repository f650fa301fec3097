"""Output to the terminal: safe printing, tables, progress bars, formats of numbers and names."""
