"""How the bits are kept: seeds, order, sampling, ranks, sums in one tree, agreement, checkpoints, digests, trace."""
