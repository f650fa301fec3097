"""pipeloom's real compute beside programs that train the same model: the same initial weights, the same batches."""
