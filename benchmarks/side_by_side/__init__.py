"""pipeloom's executor beside PyTorch's pipelining runtime: the same stages, the same processes, in turn."""
