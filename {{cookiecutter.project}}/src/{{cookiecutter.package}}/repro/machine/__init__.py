"""What a run runs on: the table of switches, the arithmetic canary, the numeric environment."""
