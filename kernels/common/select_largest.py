"""The largest of a row of numbers that one program holds, by bisection over their bits."""

from msattn.kernels.common.primitives import tl, triton


@triton.jit
def ordered_bits(x):
    """Returns integers in the order of fp32 numbers; NaN counts as infinity."""
    bits = tl.where(x == x, x, float("inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def select_largest(bits, live, number, wanted):
    """Returns which of the ``number`` entries that are ``live`` are the ``wanted`` largest, 1 or
    more; of equal ones the first.

    ``bits`` are non-negative numbers as integers, or from :func:`ordered_bits`.
    """
    # Invariant: `reached` >= wanted entries are `low` or larger, fewer than wanted are `high` or
    # larger.
    low = tl.min(tl.where(live, bits, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(live, bits, -0x7FFFFFFF), 0) + 1
    reached = number
    while (reached != wanted) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        count = tl.sum((live & (bits >= middle)).to(tl.int32), 0)
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count >= wanted, high, middle)
        reached = tl.where(count >= wanted, count, reached)
    is_selected = live & (bits >= low)
    if reached != wanted:  # entries equal to `low` tie: take the first
        last = (live & (bits == low)).to(tl.int32)
        is_selected = is_selected & (
            (last == 0) | (tl.cumsum(last, 0) <= wanted - reached + tl.sum(last, 0))
        )
    return is_selected
