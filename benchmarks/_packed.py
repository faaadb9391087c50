"""Documents of log-normal length packed into one sequence, the same ones wherever they are asked for."""

from __future__ import annotations

import random

#: Of the natural logarithm of a length.
MEAN, DEVIATION = 7.0, 1.0


def lengths(tokens: int, seed: int = 0) -> list[int]:
    """Lengths of documents that fill ``tokens``; the last one is cut off."""
    draw, found = random.Random(seed), []
    while (rest := tokens - sum(found)) > 0:
        found.append(min(rest, max(16, round(draw.lognormvariate(MEAN, DEVIATION)))))
    return found


def ids(tokens: int, seed: int = 0) -> list[int]:
    """The number of each token's document."""
    return [i for i, n in enumerate(lengths(tokens, seed)) for _ in range(n)]


def kept(tokens: int, seed: int = 0) -> int:
    """Scores that causal attention within documents keeps."""
    return sum(n * (n + 1) // 2 for n in lengths(tokens, seed))
