"""Facilities of the host: files, locks, free memory, interrupts."""
