"""What is run: the axes of a layout and the types of its numbers."""
