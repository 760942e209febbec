"""How a process starts: arguments and environment before torch loads; ranks; trainings that other commands start."""
