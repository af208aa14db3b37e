"""Selection of the best blocks of a row that one program holds.

They are found without sorting: bisection over the bits of the scores finds the smallest score to
select. If this score is tied, the first of the tied blocks are selected.
"""

from msattn.kernels.common.primitives import tl, triton

MAX_COLUMNS = 2**16  # of a row that a program holds
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # int32


def row_warps(width: int) -> int:
    """Returns the number of warps: 1 up to 1,024 columns, where sums need no barrier."""
    return min(16, max(1, width // 1024))


@triton.jit
def best_of_row(score, visible, always, count, threshold, exponent, edge_exponent, above):
    """Returns the blocks to select of a row with scores ``[COLS]``, as ``best_blocks`` defines
    them.

    ``visible`` may be selected, and ``always``, a part of them, must be.
    """
    key = tl.where(visible, tl.where(always, HIGHEST, _ordered_bits(score)), LOWEST)
    seen = tl.sum(visible.to(tl.int32), 0)
    reached = seen
    forced = tl.sum(always.to(tl.int32), 0)
    wanted = tl.minimum(tl.maximum(count, forced), reached)
    v = tl.maximum(seen, 1).to(tl.float32)
    edge = tl.where(v > above, 1 - above / v, 1.0)
    limit = threshold * tl.exp2(exponent * tl.log2(v) + edge_exponent * tl.log2(edge))
    reaches = visible & (score >= tl.where(v > above, limit, float("inf")))
    # they rank first, but reach no limit
    nans = tl.sum((visible & (score != score)).to(tl.int32), 0)
    # the best blocks are among them
    if (nans == 0) & (tl.sum((always | reaches).to(tl.int32), 0) >= wanted):
        wanted = forced

    # Invariant: `reached` >= wanted keys are `low` or larger; fewer, or only those of `always`, are
    # `high` or larger.
    low = tl.min(tl.where(visible, key, HIGHEST), 0)
    high = tl.max(tl.where(always, LOWEST, key), 0) + 1
    if wanted == forced:  # only the blocks in `always`
        low, reached = high, forced
    while (reached != wanted) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, without overflow
        enough = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(enough >= wanted, middle, low)
        high = tl.where(enough >= wanted, high, middle)
        reached = tl.where(enough >= wanted, enough, reached)
    taken = key >= low
    if reached != wanted:  # keys equal to `low` tie: take the first
        last = (key == low).to(tl.int32)
        taken = taken & ((last == 0) | (tl.cumsum(last, 0) <= wanted - reached + tl.sum(last, 0)))
    return taken | reaches


@triton.jit
def _ordered_bits(score):
    """Maps fp32 to int32 in the same order, between LOWEST and HIGHEST; NaN is the largest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), HIGHEST - 1)
