"""The search for what makes two runs differ."""
