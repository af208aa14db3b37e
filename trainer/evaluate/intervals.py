"""95 % confidence intervals."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev, variance

Z = 1.959963985  # 97.5 % quantile of the normal distribution
Interval = tuple[float, float]


def student_t(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t distribution.

    From three degrees of freedom on, the expansion in 1 / degrees of Abramowitz and Stegun, 26.7.5,
    is within 1 %.
    """
    if degrees < 3:
        return {1: 12.7062, 2: 4.3027}[degrees]
    z, n = Z, degrees
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def within(interval: Interval | None, high: float = 1.0) -> Interval | None:
    """Returns an interval without what exceeds the possible values."""
    return interval and (max(interval[0], 0.0), min(interval[1], high))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Returns the interval of the mean of independent values; None for fewer than two values."""
    if len(values) < 2:
        return None
    center = fmean(values)
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return center - half, center + half


def stratified_interval(groups: Sequence[Sequence[float]]) -> Interval | None:
    """Returns the interval of the mean of the groups' means, for independent values; None if a
    group has fewer than two.
    """
    if min(map(len, groups)) < 2:
        return None
    center = fmean(map(fmean, groups))
    half = Z * math.sqrt(sum(variance(group) / len(group) for group in groups)) / len(groups)
    return center - half, center + half


def paired_means(
    groups: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]
) -> tuple[float, Interval | None]:
    """Returns the mean over groups of the mean differences of values of the same samples, and its
    interval.

    Most of the spread of the samples cancels in the differences.
    """
    pairs = [
        [a - b for a, b in zip(values, others[name], strict=True)]
        for name, values in groups.items()
    ]
    return fmean(map(fmean, pairs)), stratified_interval(pairs)


def wilson(successes: int, trials: int) -> Interval:
    """Returns Wilson's score interval of a proportion, which stays in [0, 1] and holds near 0 and
    1.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(
            f"successes={successes}, trials={trials}: expected 0 <= successes <= trials and "
            f"trials >= 1"
        )
    share = successes / trials
    center = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = (
        Z / (1 + Z**2 / trials) * math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    )
    # The bounds at 0 and 1 are exact in theory, but not in floating point.
    return (0.0 if successes == 0 else center - half), (
        1.0 if successes == trials else center + half
    )


def paired_proportions(one: Sequence[bool], other: Sequence[bool]) -> Interval | None:
    """Returns Bonett and Price's interval of the difference of two proportions of the same trials;
    None for a single trial.

    It adds a trial to each of the two ways to differ, so that few trials without a difference do
    not have an empty interval.
    """
    trials = len(one)
    if trials < 2:
        return None
    won, lost = (
        (sum(a and not b for a, b in zip(*pair, strict=True)) + 1) / (trials + 2)
        for pair in ((one, other), (other, one))
    )
    half = Z * math.sqrt((won + lost - (won - lost) ** 2) / (trials + 2))
    return max(-1.0, won - lost - half), min(1.0, won - lost + half)
