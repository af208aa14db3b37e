"""Budgets: how many of the buckets, or blocks, that a router has scored a query reads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Probes:
    """The buckets with the highest scores, always the same number."""

    most: int


@dataclass(frozen=True)
class KeyShare:
    """The buckets whose density reaches a threshold that was calibrated to read a mean ``share`` of the keys.

    At most the ``most`` densest are read: a fixed number, as CUDA graphs need.
    """

    share: float
    density: float
    most: int


@dataclass(frozen=True)
class Probability:
    """The blocks whose predicted probability is ``least`` or more, of which there are at most ``most``."""

    least: float
    most: int


Budget = Probes | KeyShare | Probability
