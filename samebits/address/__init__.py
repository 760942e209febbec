"""The content address: what was requested, and the code, data and locks that it is made of. Loads without torch."""
