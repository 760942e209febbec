"""One HTML page on runs."""
