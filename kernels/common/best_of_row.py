"""Selection of the best blocks, or buckets, of a row that one program holds.

They are found without sorting: bisection over the bits of the scores finds the smallest score to
select. If this score is tied, the first of the tied blocks are selected.
"""

from msattn.kernels.common.primitives import tl, triton

MAX_COLUMNS = 2**16  # of a row that a program holds
# int32 keys of blocks that are not visible, that must be read, and of scores that are NaN
LOWEST, HIGHEST, NAN = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1), tl.constexpr(2**31 - 2)


def row_options(width: int) -> dict[str, int]:
    """Returns the launch options of a kernel whose programs hold a row of so many columns.

    A thread holds 32 of them up to 32,768; one warp, up to 1,024, needs no barrier for sums. With
    more than 64 registers a thread, which is the compiler's choice, an SM would hold a single row
    of 8,192 columns instead of four, and wait for each of its sums.
    """
    return {"num_warps": min(32, max(1, width // 1024)), "maxnreg": 64}


@triton.jit
def best_of_row(score, visible, always, count, threshold, exponent, edge_exponent, above):
    """Returns the blocks to select of a row with scores ``[COLS]``, as ``best_blocks`` defines
    them.

    ``visible`` may be selected, and ``always``, a part of them, must be. All that follows reads
    ``key`` alone, so that a thread holds one register for each of its blocks.
    """
    key = tl.where(visible, tl.where(always, HIGHEST, ordered_bits(score)), LOWEST)
    seen = tl.sum((key > LOWEST).to(tl.int32), 0)
    forced = tl.sum((key == HIGHEST).to(tl.int32), 0)
    wanted = tl.minimum(tl.maximum(count, forced), seen)
    v = tl.maximum(seen, 1).to(tl.float32)
    edge = tl.where(v > above, 1 - above / v, 1.0)
    limit = threshold * tl.exp2(exponent * tl.log2(v) + edge_exponent * tl.log2(edge))
    limit = ordered_bits(tl.where(v > above, limit, float("inf")))
    reach = tl.sum((key >= limit).to(tl.int32), 0)
    nans = tl.sum((key == NAN).to(tl.int32), 0)  # they rank first, but reach no limit

    low, reached = tl.min(tl.where(key > LOWEST, key, HIGHEST), 0), seen
    high = tl.max(tl.where(key == HIGHEST, LOWEST, key), 0) + 1
    if nans == 0:
        if reach >= wanted:  # the best blocks are among those that reach the limit
            wanted = forced
        else:
            high = tl.minimum(high, limit)
    if wanted == forced:  # only the blocks in `always`
        low, reached = high, forced
    taken = _largest(key, low, high, reached, wanted)
    return taken | ((key >= limit) & (key != NAN))


@triton.jit
def largest_of_row(score, live, wanted):
    """Returns the ``wanted`` largest of the ``live`` scores ``[COLS]``, 1 to all of them; of equal
    ones the first. NaN is the largest.
    """
    key = tl.where(live, ordered_bits(score), LOWEST)
    low = tl.min(tl.where(live, key, HIGHEST), 0)
    return _largest(key, low, tl.max(key, 0) + 1, tl.sum(live.to(tl.int32), 0), wanted)


@triton.jit
def _largest(key, low, high, reached, wanted):
    """Returns the ``wanted`` largest keys.

    Invariant: ``reached`` keys, at least ``wanted``, are >= low; fewer, or only those of blocks
    that must be read, are >= high.
    """
    while (reached != wanted) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, without overflow
        enough = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(enough >= wanted, middle, low)
        high = tl.where(enough >= wanted, high, middle)
        reached = tl.where(enough >= wanted, enough, reached)
    # Keys equal to `low` may tie: the first ones are taken, those before column `end`.
    c = tl.arange(0, key.shape[0])
    begin, end = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + key.shape[0]
    if reached != wanted:
        ties = wanted - reached + tl.sum((key == low).to(tl.int32), 0)
        while begin + 1 < end:
            middle = (begin + end) // 2
            enough = tl.sum(((key == low) & (c < middle)).to(tl.int32), 0)
            end = tl.where(enough >= ties, middle, end)
            begin = tl.where(enough >= ties, begin, middle)
    return (key > low) | ((key == low) & (c < end))


@triton.jit
def ordered_bits(score):
    """Maps fp32 to int32 in the same order, between LOWEST and HIGHEST; NaN is the largest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)
