"""A cosine that is the same on every machine, for learning rates: the C library's may differ in its last bit."""

BITS = 128
PI = 0x3243F6A8885A308D313198A2E03707344  # pi * 2**BITS, rounded down


def cosine(numerator: int, denominator: int) -> float:
    """cos(pi * numerator / denominator), correctly rounded, from integers alone.

    A rate that falls from `peak` to 0 along half a wave is `peak * (1 + cosine(step, steps)) / 2`.

    Raises:
        ZeroDivisionError: the denominator is 0.
    """
    numerator, denominator = abs(numerator) % (2 * abs(denominator)), abs(denominator)
    numerator = min(numerator, 2 * denominator - numerator)  # the second half of the wave mirrors the first
    if mirrored := 2 * numerator > denominator:
        numerator = denominator - numerator  # as the second quarter does, below zero
    if 2 * numerator == denominator:
        return 0.0
    square = (PI * numerator // denominator) ** 2 >> BITS
    term, total, power = 1 << BITS, 0, 0
    while term:  # the Taylor series
        total += term
        power += 2
        term = -(term * square >> BITS) // (power * (power - 1))
        if term == -1:  # what is left of a negative term rounded down
            break
    return (-total if mirrored else total) / (1 << BITS)
