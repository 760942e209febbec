"""The operations of one step, and the lines of code, that put bits at risk."""
