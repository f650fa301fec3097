"""pipeloom's executor and PyTorch's pipelining runtime: the same stages, the same processes, in turn."""
