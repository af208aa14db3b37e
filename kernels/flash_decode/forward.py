"""Attention of a few queries over a long cache, cut into splits that programs read side by side (flash decoding).

    s_ij = score_mod(scale * q_i k_j), -inf where i does not see j        out_i = softmax_j(s_ij) v_j

`partial`: each split keeps its own row maximum m_s, with l_s = sum exp(s - m_s) and o_s = sum exp(s - m_s) v; a second kernel
rebases and adds them, ``out = sum exp(m_s - m) o_s / sum exp(m_s - m) l_s``. `global`: a first pass over the keys alone finds
the row maxima, the second starts from the largest of them, m, and its sums just add up. ``lse = m + log l`` in both.

Reading is what takes time: N * group rows need 4 * N * group * D operations for the 4 * D bytes of a key and its value in 16
bits, so that up to some hundred rows the tensor cores wait for memory. All queries of a key/value head's group therefore share
the rows of one tile, which reads keys and values once, 2 * M * D * Hkv numbers in all as any exact attention must; `global`
reads the keys twice, half as much again, to save exp(m_s - m) for N * group rows of a few splits. Only the splits' results come
on top, D + 2 fp32 numbers a row and split. The largest of the maxima is found by each program of the second pass for itself:
they are a few numbers, and a kernel more would cost more than reading them.

Whole tiles are read by descriptor where keys and values lie in aligned rows: a few long requests come nearer to the memory's
rate than many short ones. What is left of the last split, and a cache in any other layout, is read by pointer.

Tiles: BM rows (row r = query r % N of the group's head r // N), BN keys, BD head size. Layouts: part_max, part_sum ``[B, Hkv,
G * N, S]``, base 2 and not yet normalised; part_out ``[B, Hkv, G * N, S, D]``; of one split, that is the result. Programs:
(split, block of rows), key/value head, sequence; then those that merge.
"""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.checks import has_aligned_rows, resolve_backend, resolve_scale, statistics_dtype
from msattn.kernels.common.decode_checks import check_flash_decode
from msattn.kernels.common.primitives import (
    LN_2,
    LOG2_E,
    capability,
    load_tile,
    num_processors,
    padded_head,
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    precision,
    softmax_step,
    tile_view,
    tl,
    triton,
)
from msattn.kernels.common.splits import choose_splits, merge_splits
from msattn.kernels.flash_decode.score_mod import built_in
from msattn.kernels.tuned import Tile
from msattn.kernels.types import Backend, ScoreMod, SparseAttention, Variant


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: Variant = "partial",
    causal: bool = False,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    splits: int | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Exact attention of a few queries over a long cache, read by as many programs as the GPU holds (flash decoding).

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries of the newest N tokens, at positions ``kv_len - N`` and on; fp32, fp16 or bf16 (fp64 on the torch backend). Made
        for 1 to 16 of them, right for any number.
    k, v : Tensor ``[B, Hkv, M, D]``
        The cache; query head h reads head ``h // (Hq // Hkv)``. Strided views are read as they are.
    variant : {"partial", "global"}
        Each split with its own row maximum, rebased afterwards; or all with the row's, found in a pass before. Both exact.
    causal : bool
        A query sees no key after itself (speculative decoding); else all queries see all keys.
    score_mod : ScoreMod, optional
        What becomes of the scaled scores before masking: :mod:`msattn.kernels.flash_decode.score_mod` has softcap, alibi and sliding_window.
        One's own goes around PyTorch's operators, and so is no part of a graph that ``torch.compile`` captures.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.
    kv_len : Tensor int32 ``[B]``, optional
        How many of the M positions are filled, padding included; all by default.
    splits : int, optional
        In how many parts the keys are read; chosen from the shapes and the GPU by default, so that a captured graph serves any
        length.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` (natural logarithm, fp32); 0 and -inf for queries that see nothing.

    Raises
    ------
    ValueError
        For arguments that do not fit, by name. What ``kv_start`` and ``kv_len`` hold is checked by the reference alone; the
        kernel never leaves the cache, whatever they hold.
    NotImplementedError
        In the backward pass: this is for inference.
    """
    check_flash_decode(q, k, v, variant, score_mod, kv_start, kv_len, splits)
    scale = resolve_scale(scale, q.shape[3])
    backend = resolve_backend(backend, q)
    options = (kv_start, kv_len, variant, causal, scale, splits, backend)
    if score_mod is not None and not score_mod.built_in:
        return SparseAttention(*_run_with_own_mod(q, k, v, score_mod, *options))  # type: ignore[call-arg]
    name, tensors, numbers = (score_mod.built_in, score_mod.tensors, score_mod.numbers) if score_mod else ("", (), ())
    return SparseAttention(*_operator(q, k, v, name, list(tensors), [float(x) for x in numbers], *options))


@torch.library.custom_op("msattn::flash_decode", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mod: str,
    mod_tensors: list[Tensor],
    mod_numbers: list[float],
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    variant: str,
    causal: bool,
    scale: float,
    splits: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    score_mod = built_in(mod, mod_tensors, mod_numbers) if mod else None
    return _run(q, k, v, score_mod, kv_start, kv_len, variant, causal, scale, splits, backend)


@_operator.register_fake
def _(q, k, v, mod, mod_tensors, mod_numbers, kv_start, kv_len, variant, causal, scale, splits, backend):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=statistics_dtype(q))


def _backward(ctx, dout, dlse):
    raise NotImplementedError("flash_decode is for inference and has no gradient: detach its inputs, or use torch.no_grad()")


_operator.register_autograd(_backward)


class _WithOwnMod(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        return _run(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        _backward(ctx, *gradients)


@torch.compiler.disable
def _run_with_own_mod(*arguments) -> tuple[Tensor, Tensor]:
    """The operator for a score_mod that no schema can hold."""
    return _WithOwnMod.apply(*arguments)  # type: ignore[return-value]


def _run(q, k, v, score_mod, kv_start, kv_len, variant, causal, scale, splits, backend) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        with torch.cuda.device_of(q):
            return launch(q, k, v, score_mod, kv_start, kv_len, variant, causal, scale, splits)
    return reference.flash_decode(
        q, k, v, variant=variant, causal=causal, score_mod=score_mod, scale=scale,
        kv_start=kv_start, kv_len=kv_len, splits=splits,
    )  # fmt: skip


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    variant: str,
    causal: bool,
    scale: float,
    splits: int | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels; ``tile`` overrides the shipped choice, for tuning.

    The grid follows shapes alone, so that a captured graph serves any lengths.
    """
    batch, q_heads, num_queries, head = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group, cols = q_heads // kv_heads, padded_head(head)
    rows = group * num_queries
    tile = tile or default_tile(rows, cols, q.element_size(), capability(q.device))
    row_blocks = triton.cdiv(rows, tile.rows)
    slots = tile.programs * num_processors(q.device)
    tiles, enough = triton.cdiv(num_keys, tile.keys), 1.0 if row_blocks == 1 else 0.95  # many rows leave much to be merged
    splits = min(splits or choose_splits(batch * kv_heads * row_blocks, slots, tiles, enough), tiles)
    window = None if score_mod is None else score_mod.window
    mod_arguments = () if score_mod is None else (*score_mod.tensors, *score_mod.numbers)
    aligned = all(has_aligned_rows(x) and 0 not in x.stride() for x in (k, v))  # no descriptor for expanded dimensions
    views = [tile_view(x, tile.keys) if aligned else None for x in (k, v)]

    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    part_max = q.new_empty((batch, kv_heads, rows, splits), dtype=torch.float32)
    part_sum, part_out = lse, out
    if splits > 1:
        part_sum, part_out = torch.empty_like(part_max), part_max.new_empty((*part_max.shape, head))
    for step in ("max", "sum") if variant == "global" else ("partial",):
        _split_kernel[(splits * row_blocks, kv_heads, batch)](
            q, k, v, *views, part_max, part_sum, part_out, kv_start, kv_len, mod_arguments,
            *q.stride(), *k.stride(), *v.stride(),
            group, num_queries, num_keys, row_blocks, num_keys + num_queries if window is None else window,
            scale, LOG2_E if score_mod else scale * LOG2_E,
            STEP=step, WHOLE=splits == 1, MOD=score_mod.kernel if score_mod else None, CAUSAL=causal,
            HEAD=head, BM=tile.rows, BN=tile.keys, BD=cols, PRECISION=precision(q.dtype),
            num_warps=tile.warps, num_stages=tile.stages * (2 if step == "max" else 1),  # as many bytes under way without V
            **pdl_args(q.device),
        )  # fmt: skip
    if splits > 1:
        merge_splits(part_max, part_sum, part_out, out, lse, rebase=variant == "partial")
    return out, lse


def default_tile(rows: int, cols: int, itemsize: int, sm: int) -> Tile:
    """Rows up to 128 read keys and values once. Three tiles of each are in shared memory: of 32 KiB where that has 227."""
    if itemsize == 4:  # on CUDA cores
        return Tile(rows=max(16, min(32, triton.next_power_of_2(rows))), keys=16, warps=8, stages=3, programs=2)
    rows = max(16, min(128, triton.next_power_of_2(rows)))
    large = 90 <= sm < 120 and rows < 128
    keys = max(16, min(128, 32768 // (cols * itemsize)) if large else min(64, 16384 // (cols * itemsize)))
    programs = 2 if rows < 128 and keys * cols * itemsize <= 16384 else 1
    return Tile(rows=rows, keys=keys, warps=4 if rows < 128 else 8, stages=3, programs=programs)


@triton.jit(do_not_specialize=["group", "num_queries", "num_keys", "row_blocks", "window"])
def _split_kernel(
    q, k, v, k_desc, v_desc, part_max, part_sum, part_out, kv_start, kv_len, mod_arguments,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_km, stride_kd,
    stride_vb, stride_vh, stride_vm, stride_vd,
    group, num_queries, num_keys, row_blocks, window, scale, scale2,
    STEP: tl.constexpr, WHOLE: tl.constexpr, MOD: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of the keys for a block of rows: its maxima ("max"), sums that start from all ("sum"), or both ("partial")."""
    pdl_wait(PDL)
    if STEP != "max" and not WHOLE:  # what comes next is the merging kernel
        pdl_launch_dependents(PDL)
    split, row_block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks
    num_splits = tl.num_programs(0) // row_blocks
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    rows = group * num_queries
    row = row_block * BM + tl.arange(0, BM)
    packed = tl.minimum(row, rows - 1)  # rows past the end repeat the last one
    head = kv_head * group + packed // num_queries
    first, stop, start, offset = _share(kv_start, kv_len, batch, split, num_splits, num_queries, num_keys, window, CAUSAL, BN)
    i = offset + packed % num_queries

    o_d = tl.arange(0, BD)
    m_d = o_d < HEAD
    p_q = q + batch.to(tl.int64) * stride_qb + (head.to(tl.int64) * stride_qh + packed % num_queries * stride_qn)[:, None]
    b_q = tl.load(p_q + o_d[None, :] * stride_qd, mask=m_d[None, :], other=0.0)  # [BM, BD]
    k += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    part = (batch * tl.num_programs(1) + kv_head).to(tl.int64) * rows + row
    part = part * num_splits + split  # [BM]
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    if STEP == "sum":
        m = _row_max(part_max + (part - split), row < rows, num_splits, BM)
    base = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf is NaN

    by_pointer = first
    if k_desc is not None:
        by_pointer += tl.maximum(stop - first, 0) // BN * BN
        for j0 in tl.range(first, by_pointer, BN):
            j = j0 + tl.arange(0, BN)
            s = tl.dot(b_q, tl.trans(load_tile(k_desc, batch, kv_head, j0, BN, BD)), input_precision=PRECISION)
            s = _modify(s, batch, head, i, j, start, num_keys, scale, mod_arguments, MOD, CAUSAL)
            if STEP == "max":
                m = tl.maximum(m, tl.max(s, 1) * scale2)
            else:
                b_v = load_tile(v_desc, batch, kv_head, j0, BN, BD)
                m, l, acc = _add_values(s, b_v, m, l, acc, base, scale2, STEP, PRECISION)
    for j0 in tl.range(by_pointer, stop, BN):
        j = j0 + tl.arange(0, BN)
        live = j < stop
        m_tile = live[:, None] & m_d[None, :]
        key = j.to(tl.int64)[:, None]
        b_k = tl.load(k + key * stride_km + o_d[None, :] * stride_kd, mask=m_tile, other=0.0)  # [BN, BD]
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
        s = _modify(s, batch, head, i, j, start, num_keys, scale, mod_arguments, MOD, CAUSAL)
        s = tl.where(live[None, :], s, float("-inf"))
        if STEP == "max":
            m = tl.maximum(m, tl.max(s, 1) * scale2)
        else:
            b_v = tl.load(v + key * stride_vm + o_d[None, :] * stride_vd, mask=m_tile, other=0.0)  # [BN, BD]
            m, l, acc = _add_values(s, b_v, m, l, acc, base, scale2, STEP, PRECISION)

    if STEP == "max" or WHOLE:  # were it let in earlier, its programs would fill some processors before others
        pdl_launch_dependents(PDL)
    if STEP == "max" or (STEP == "partial" and not WHOLE):
        tl.store(part_max + part, m, mask=row < rows)
    if STEP != "max":
        if WHOLE:
            l = tl.where(l > 0, l, 1.0)  # 0 where nothing was seen, and acc with it
            acc = acc / l[:, None]
            l = (m + tl.log2(l)) * LN_2
        tl.store(part_sum + part, l, mask=row < rows)
        p_out = part_out + part[:, None] * HEAD + o_d[None, :]
        tl.store(p_out, acc.to(part_out.dtype.element_ty), mask=(row < rows)[:, None] & m_d[None, :])


@triton.jit
def _modify(
    s, batch, head, i, j, start, num_keys, scale, mod_arguments, MOD: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Scores ``s [BM, BN]`` of queries i and keys j as the modification wants them, -inf where a query may not see a key."""
    if MOD is not None:
        i_given, j_given = tl.maximum(i, 0), tl.minimum(j, num_keys - 1)  # places that exist, also for what is masked
        s = MOD(s * scale, batch, head[:, None], i_given[:, None], j_given[None, :], *mod_arguments)
    seen = (i >= start)[:, None]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _add_values(s, v, m, l, acc, base, scale2, STEP: tl.constexpr, PRECISION: tl.constexpr):
    """A tile's scores and values, added to sums relative to their own maximum or, for "sum", to the row's."""
    if STEP == "partial":
        m, l, acc = softmax_step(s, tl.max(s, 1), v, m, l, acc, scale2, PRECISION)
    else:
        p = tl.exp2(s * scale2 - base[:, None])
        l += tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return m, l, acc


@triton.jit
def _share(
    kv_start, kv_len, batch, split, num_splits, num_queries, num_keys, window, CAUSAL: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A split's keys ``first <= j < stop``, an even share of tiles of what is seen; first real key; query 0's position."""
    start = tl.maximum(tl.load(kv_start + batch), 0) if kv_start is not None else 0
    end = tl.minimum(tl.load(kv_len + batch), num_keys) if kv_len is not None else num_keys
    offset = end - num_queries
    if not CAUSAL:
        offset = tl.maximum(offset, 0)
    first = tl.maximum(start, offset + 1 - window)
    share = tl.cdiv(tl.maximum(end - first, 0), num_splits * BN) * BN
    first += split * share
    return first, tl.minimum(first + share, end), start, offset


@triton.jit
def _row_max(parts, exists, num_splits, BM: tl.constexpr):
    """Largest of the splits' maxima, for each row ``parts [BM]`` of them."""
    largest = tl.full([BM, 32], float("-inf"), tl.float32)
    for first in tl.range(0, num_splits, 32):  # type: ignore[misc]
        s = first + tl.arange(0, 32)[None, :]
        m_s = exists[:, None] & (s < num_splits)
        largest = tl.maximum(largest, tl.load(parts[:, None] + s, mask=m_s, other=float("-inf")))
    return tl.max(largest, 1)
