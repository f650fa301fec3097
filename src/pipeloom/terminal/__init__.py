"""What reaches the terminal, and words for it."""
