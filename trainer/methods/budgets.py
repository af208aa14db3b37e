"""Budgets, which limit how many of the scored buckets or blocks a query reads."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval

from msattn.kernels.bucket_decode import PROBES_AT_ONCE
from msattn.trainer.errors import UserError

PROBE_LIMIT_FACTOR = 4  # times the number of buckets that hold the share, if all are equally large


@dataclass(frozen=True)
class Probes:
    """A fixed number of buckets, those with the highest scores."""

    most: int


@dataclass(frozen=True)
class KeyShare:
    """Buckets whose density reaches a threshold, which was calibrated to read a mean ``share`` of
    the keys.

    At most the ``most`` densest ones are read, because CUDA graphs need a fixed number.
    """

    share: float
    density: float
    most: int


@dataclass(frozen=True)
class Probability:
    """Blocks whose predicted probability is at least ``least``; there are at most ``most`` of
    them.
    """

    least: float
    most: int


Budget = Probes | KeyShare | Probability


@dataclass(frozen=True)
class KeyThresholds:
    """Thresholds for a grid of mean shares, as manifests hold them.

    :func:`msattn.trainer.methods.key_thresholds.calibrate_keys` measures them.
    """

    shares: list[Annotated[float, Interval(gt=0, le=1)]]
    densities: list[Annotated[float, Interval(gt=0, lt=2.0**30)]]

    def __post_init__(self) -> None:
        if not self.shares or sorted(set(self.shares)) != self.shares:
            raise ValueError("shares must increase")
        if (
            len(self.densities) != len(self.shares)
            or sorted(self.densities, reverse=True) != self.densities
        ):
            raise ValueError(
                f"densities must be {len(self.shares)} numbers that decrease, one for each share"
            )

    def density(self, share: float) -> float:
        """Returns the density from which a mean ``share`` of the keys is read, interpolated on
        logarithmic scales.

        Raises UserError: the table does not cover ``share``.
        """
        if not self.shares[0] <= share <= self.shares[-1]:
            raise UserError(
                f"keys={share}: the router is calibrated from {self.shares[0]} to {self.shares[-1]}"
            )
        return float(
            np.exp(np.interp(np.log(float(share)), np.log(self.shares), np.log(self.densities)))
        )

    def budget(self, share: float, num_buckets: int) -> KeyShare:
        """Returns the budget that reads a mean ``share`` of the keys."""
        return KeyShare(share, self.density(share), most_probes(share, num_buckets))


def most_probes(share: float, num_buckets: int) -> int:
    """Returns the largest number of buckets that a query reads for a mean ``share`` of the keys;
    CUDA graphs need such a fixed number.
    """
    most = PROBE_LIMIT_FACTOR * share * num_buckets
    return min(num_buckets, PROBES_AT_ONCE * math.ceil(most / PROBES_AT_ONCE))
