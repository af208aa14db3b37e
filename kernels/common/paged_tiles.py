"""Loads of tiles from packed queries and from a paged cache; see :class:`msattn.kernels.types.PagedKeys`."""

from msattn.kernels.common.primitives import tl, triton


@triton.jit
def packed_span(p_cu_queries, p_kv_len, b, num_queries, num_keys):
    """Returns the bounds of sequence b of ``num_queries`` packed queries, whose table has room for ``num_keys``.

    They are the row of its first query, the number of keys, the number of queries, and ``delta`` (see
    :mod:`msattn.kernels.common.primitives`). Values are clamped, so that nothing outside the tensors is read.
    """
    first_row = tl.minimum(tl.maximum(tl.load(p_cu_queries + b), 0), num_queries)
    end = tl.minimum(tl.load(p_cu_queries + b + 1), num_queries)
    queries = tl.maximum(end - first_row, 0)
    keys = tl.minimum(tl.maximum(tl.load(p_kv_len + b), 0), num_keys)
    return first_row, keys, queries, keys - queries


@triton.jit
def load_pages(p_table, stride_table, u0, keys, PAGE: tl.constexpr, BN: tl.constexpr):
    """Returns the pages of keys ``u0`` to ``u0 + BN``, and their offsets ``[BN]`` within them.

    Tiles within one page get a scalar, whose load costs nothing beside that of the keys. Entries of the table past the last key
    are not read, page 0 stands for them.
    """
    u = u0 + tl.arange(0, BN)
    if PAGE % BN == 0:
        page = tl.load(p_table + (u0 // PAGE) * stride_table, mask=u0 < keys, other=0)
    else:
        page = tl.load(p_table + (u // PAGE) * stride_table, mask=u < keys, other=0)
    return page.to(tl.int64), u % PAGE


@triton.jit
def load_keys(ptr, page, offset, live, stride_page, stride_slot, HEAD: tl.constexpr, COLS: tl.constexpr):
    """Loads keys or values ``[BN, COLS]`` of one head.

    Those that are not ``live [BN]`` are 0: slots that are not filled may hold NaN, which a probability of 0 would not remove.
    """
    d = tl.arange(0, COLS)
    rows = ptr + page * stride_page + offset * stride_slot
    mask = live[:, None] if HEAD == COLS else live[:, None] & (d < HEAD)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)
