"""Loads of tiles from packed queries and from a paged cache; see
:class:`msattn.kernels.types.PagedKeys`.
"""

from msattn.kernels.common.primitives import tl, triton


@triton.jit
def packed_span(cu_queries_ptr, kv_len_ptr, b, num_queries, num_keys):
    """Returns the bounds of sequence b of ``num_queries`` packed queries, whose table has room for
    ``num_keys``.

    They are the row of its first query, the number of keys, the number of queries, and ``delta``
    (see :mod:`msattn.kernels.common.primitives`). Values are clamped, so that nothing outside the
    tensors is read.
    """
    first_row = tl.minimum(tl.maximum(tl.load(cu_queries_ptr + b), 0), num_queries)
    end = tl.minimum(tl.load(cu_queries_ptr + b + 1), num_queries)
    queries = tl.maximum(end - first_row, 0)
    keys = tl.minimum(tl.maximum(tl.load(kv_len_ptr + b), 0), num_keys)
    return first_row, keys, queries, keys - queries


@triton.jit
def load_pages(table_ptr, position, live, PAGE: tl.constexpr):
    """Returns the pages of positions, and their offsets within them.

    Entries of the table whose positions are not ``live`` are not read, page 0 stands for them.
    """
    return tl.load(table_ptr + position // PAGE, mask=live, other=0), position % PAGE
