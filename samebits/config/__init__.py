"""The config: its keys, params.yaml, and the forms of files that people or programs wrote. Loads without torch."""
