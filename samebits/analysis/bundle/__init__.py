"""The archive of some runs that an artifact evaluation asks for."""
