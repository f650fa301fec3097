"""What a rank has of the model and the batch: stages, weights, what they keep for backwards, where all that is."""
