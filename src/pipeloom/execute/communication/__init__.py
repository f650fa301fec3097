"""Communication between ranks: messages between stages, collectives, wires for evicted activations."""
