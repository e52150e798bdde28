"""Models on a card: the same layers, joined into a programme of fused operations."""
