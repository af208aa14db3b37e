"""Benchmarks of the kernels: checks operations and times them with their peers.

An operation that disagrees with its reference is not timed. Peers (competing implementations) are timed in the same run,
because clock drift between runs exceeds the differences between kernels. Every row reports its share of the measured peak
throughput of this machine. Rows are returned; this package writes no files.
"""

from msattn.kernels.bench.candidate_tiles import SHIPPED, faster_tiles, list_candidates
from msattn.kernels.bench.cases import Options, ReferenceMismatch
from msattn.kernels.bench.rows import BenchRow, Shape
from msattn.kernels.bench.run import CASES, measure, sweep

__all__ = [
    "CASES",
    "SHIPPED",
    "BenchRow",
    "Options",
    "ReferenceMismatch",
    "Shape",
    "faster_tiles",
    "list_candidates",
    "measure",
    "sweep",
]
