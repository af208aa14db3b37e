"""Benchmarks of the kernels: checks operations and times them and their peers.

An operation that disagrees with its reference is not timed. Peers (competing implementations) are
timed in the same run, because clock drift between runs exceeds the differences between kernels.
Every row has its share of this machine's measured peak throughput. Functions return rows; this
package writes no files.
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
