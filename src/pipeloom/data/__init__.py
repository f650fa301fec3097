"""Text, tokens, batches."""
