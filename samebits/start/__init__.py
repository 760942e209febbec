"""How processes start: ranks, trainings that other commands start, and forks of a process that has torch loaded."""
