"""Whether counted draws follow a distribution."""

import numpy as np
from jax.scipy.stats import chi2

ALMOST_NEVER = 1e-4


def p_value(draws, expected) -> float:
    """Of Pearson's chi-square test; categories with fewer than 5 expected draws are taken as one.

    Args:
        draws: Category of each draw.
        expected: Probability of each category; a draw where it is 0 gives 0.
    """
    expected = np.asarray(expected, np.float64)
    counts = np.bincount(np.asarray(draws).reshape(-1), minlength=len(expected))
    if len(counts) > len(expected) or counts[expected == 0].any():
        return 0.0
    wanted = expected / expected.sum() * counts.sum()
    rare = wanted < 5
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    statistic = float(np.sum((counts - wanted) ** 2 / wanted))
    return float(chi2.sf(statistic, len(wanted) - 1))


def assert_follows(draws, expected) -> None:
    assert p_value(draws, expected) > ALMOST_NEVER


def assert_does_not_follow(draws, expected) -> None:
    assert p_value(draws, expected) < ALMOST_NEVER
