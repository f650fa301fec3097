"""A rank's stages and batch: forward and backward, weights, saved activations, stages in host memory."""
