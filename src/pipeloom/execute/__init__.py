"""Schedule + stages + batch -> trace: transports, stages and the interpreter. Needs torch."""
