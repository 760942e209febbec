"""A training project whose runs repeat bit for bit. What you edit lies here; `repro` is the machinery."""
