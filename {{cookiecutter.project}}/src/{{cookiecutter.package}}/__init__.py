"""A training project whose runs repeat bit for bit. What you edit lies here; samebits is the library."""
