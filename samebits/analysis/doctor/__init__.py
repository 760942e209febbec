"""A checklist of what would make a run fail, or not be repeatable."""
