"""From an operation's name to rows: check it, then time it beside its peers."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from msattn.kernels.bench import decode, prefill, selection, targets
from msattn.kernels.bench.candidate_tiles import SHIPPED, launched_with, shipped_alone, to_try, variant
from msattn.kernels.bench.cases import Case, Disagreement, Function, Options, Peer, check, runner
from msattn.kernels.bench.ceilings import ceilings
from msattn.kernels.bench.full_size import error_at_size
from msattn.kernels.bench.rows import BenchRow, Shape, Work, rated
from msattn.kernels.bench.timing import compile_seconds, peak_memory_gb, time_ms

CASES: dict[str, Callable[[Shape, Options], Iterator[Case]]] = {
    "maxpool_attention": prefill.maxpool_attention,
    "block_sparse_attention": prefill.block_sparse_attention,
    "multiscale_attention": prefill.multiscale_attention,
    "conv_attention": prefill.conv_attention,
    "head_mix_attention": prefill.head_mix_attention,
    "bucket_decode": decode.bucket_decode,
    "probe_buckets": decode.probe_buckets,
    "flash_decode": decode.flash_decode,
    "conv_decode": decode.conv_decode,
    "bucket_mass": targets.bucket_mass,
    "merge_states": targets.merge_states,
    "nearest_centroid": targets.nearest_centroid,
    "gate_scores": selection.gate_scores,
    "pool_blocks": selection.pool_blocks,
    "best_blocks": selection.best_blocks,
}


def measure(operation: str, shape: Shape, options: Options) -> Iterator[BenchRow]:
    """Time an operation and its peers at each length; peers come before what they stand beside.

    Parameters
    ----------
    operation : a key of :data:`msattn.kernels.operations.OPERATIONS`.
    shape : size of a problem; its length is replaced by each of ``options.lengths``.
    options : what to measure.

    Yields
    ------
    BenchRow
        As soon as it is measured. A peer that cannot run here has no time, and a note that says why.

    Raises
    ------
    Disagreement
        If the operation is not what its reference says: at a small shape, before anything is timed, or at the shape just timed.
    """
    for case in CASES[operation](shape.small(), options):
        check(case, options.backward)
    for length in options.lengths:
        bench = _Bench(operation, replace(shape, length=length), options.backward)
        beside: dict[Peer, BenchRow] = {}
        for case in CASES[operation](bench.shape, options):
            for peer in case.peers:
                if peer.name in options.peers and peer not in beside:
                    beside[peer] = bench.peer(peer, case)
                    yield beside[peer]
            row = bench.own(case, "msattn")
            timed = {peer.name: beside[peer].ms for peer in case.peers if peer in beside}
            yield replace(row, times={name: ms / row.ms for name, ms in timed.items() if ms and row.ms})


def sweep(operation: str, shape: Shape, options: Options) -> Iterator[BenchRow]:
    """Time an operation with its shipped tiles, and with those to try of each of its kernels in turn; no peers.

    Yields
    ------
    BenchRow
        A tile that does not fit, or whose result is wrong, has no time, and a note that says why.

    Raises
    ------
    Disagreement
        If the operation with its shipped tiles is not what its reference says.
    """
    for length in options.lengths:
        bench = _Bench(operation, replace(shape, length=length), options.backward)
        for choice in (None, *to_try(operation, options.backward)):
            name = SHIPPED if choice is None else variant(*choice)
            with shipped_alone(), nullcontext() if choice is None else launched_with(*choice):
                try:
                    with compile_seconds() as taken:
                        for case in CASES[operation](shape.small(), options):
                            check(case, options.backward)
                    for case in CASES[operation](bench.shape, options):
                        yield replace(bench.own(case, name), compile_s=max(taken, default=None))
                except Exception as error:
                    if choice is None and isinstance(error, Disagreement):
                        raise
                    yield replace(bench.row(name, "", 0.0), note=f"absent: {_reason(error)}")


class _Bench:
    """Takes the times of one operation at one shape."""

    def __init__(self, operation: str, shape: Shape, backward: bool) -> None:
        self.operation, self.shape, self.backward = operation, shape, backward
        on_cpu = f"CPU, {torch.get_num_threads()} threads"
        self.where = {
            "device": on_cpu if shape.device == "cpu" else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": _triton_version(),
        }

    def own(self, case: Case, variant: str) -> BenchRow:
        """The operation itself, timed and then compared at this size; Disagreement if it is not what its reference says."""
        row = self.row(variant, case.setting, case.sparsity, case.queries)
        try:
            timed = self._time(case.call, case.layers, case.work, case.graph)
        except torch.OutOfMemoryError:
            return replace(row, note="absent: out of memory")
        return replace(row, **timed, error=error_at_size(case, self.backward))

    def peer(self, peer: Peer, case: Case) -> BenchRow:
        """What stands beside it, or why it does not: a peer is others' code, which may raise anything."""
        row = replace(self.row(peer.name, peer.setting, peer.sparsity, case.queries), note=peer.note)
        try:
            return replace(row, **self._time(peer.prepare(), peer.layers, peer.work, case.graph))
        except Exception as error:
            return replace(row, note=f"absent: {_reason(error)}")

    def _time(self, function: Function, layers: Any, work: Work, graph: bool) -> dict[str, Any]:
        shape = self.shape
        run = runner(function, layers, self.backward, graph, shape.device)
        took = time_ms(run, shape.device, budget_s=0.5 if shape.device == "cpu" else 5.0)
        median, q1, q3 = (ms / len(layers) for ms in took)
        memory = peak_memory_gb(runner(function, layers[:1], self.backward, False, shape.device), shape.device)
        rates = rated(work, median, ceilings(shape.device, shape.dtype))
        return {"ms": median, "q1": q1, "q3": q3, "memory_gb": memory, **rates}

    def row(self, variant: str, setting: str, sparsity: float, queries: int | None = None) -> BenchRow:
        """A row without a time."""
        shape = self.shape
        return BenchRow(
            self.operation,
            "backward" if self.backward else "forward",
            variant,
            setting,
            shape.batch,
            shape.length,
            queries or shape.length,
            shape.q_heads,
            shape.kv_heads,
            shape.head_size,
            str(shape.dtype).removeprefix("torch."),
            sparsity,
            **self.where,
        )


def _reason(error: Exception) -> str:
    """One line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _triton_version() -> str:
    if find_spec("triton") is None:
        return ""
    import triton

    return triton.__version__
