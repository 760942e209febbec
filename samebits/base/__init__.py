"""What every other part stands on: the project's folders, files, git, text, progress. Loads without torch."""
