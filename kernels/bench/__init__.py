"""Kernels beside their peers on this machine.

Three rules keep a figure honest. An operation that disagrees with its reference is not timed. Peers are timed in the same
run, because a machine's clock drifts more than kernels differ. And each row says what share it is of what this machine was
measured to do. Rows are returned, not written.
"""

from msattn.kernels.bench.candidate_tiles import fastest, to_try
from msattn.kernels.bench.cases import Disagreement, Options
from msattn.kernels.bench.rows import BenchRow, Shape
from msattn.kernels.bench.run import CASES, measure, sweep

__all__ = ["CASES", "BenchRow", "Disagreement", "Options", "Shape", "fastest", "measure", "sweep", "to_try"]
