"""Analysis of a trace, simulated or measured: times, bubbles, communication, memory over time."""
