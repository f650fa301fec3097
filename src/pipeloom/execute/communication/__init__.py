"""How ranks reach each other: messages between stages, collectives, wires for what is evicted."""
