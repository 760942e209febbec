"""MLflow, from a process of its own that reads the record."""
