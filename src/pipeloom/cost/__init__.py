"""How long and how large: what actions cost."""
