"""Checkpoints: written in the background, verified to the last byte before use."""
