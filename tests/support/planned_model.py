"""The model of tests that plan a run file."""

MODEL = """
model.num_layers = 8
model.hidden_size = 1024
model.num_heads = 16
model.vocab_size = 32000
data.seq_len = 1024
"""
