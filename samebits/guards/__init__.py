"""Guards: each refuses, by name, something that would make a result depend on what no hash covers."""
