"""The trace: one row of digests per step."""
