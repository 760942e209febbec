"""The numeric environment: what a run runs on, whether its bits are portable, and whether the ranks agree."""
