"""What this host offers: files, locks, memory, stopping."""
