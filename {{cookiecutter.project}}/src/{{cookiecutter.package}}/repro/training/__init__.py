"""How the bits are kept: seeds, order, sampling, ranks, exact sums, agreement, checkpoints, digests, trace."""
