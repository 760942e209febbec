"""What decides bits, and nothing else: imports torch, numpy and itself. Its digest enters the content address."""
