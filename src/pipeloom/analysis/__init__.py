"""What a trace says, whether it was simulated or measured: times, bubbles, communication, memory over time."""
