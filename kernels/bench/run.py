"""Benchmark of an operation by name: check, timing of peers, sweep over tiles."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from msattn.kernels import tuned
from msattn.kernels.bench import clustering_cases, decode_cases, prefill_cases, selection_cases
from msattn.kernels.bench.candidate_tiles import (
    SHIPPED,
    list_candidates,
    override_tile,
    variant_name,
)
from msattn.kernels.bench.cases import (
    BenchCase,
    Function,
    Options,
    Peer,
    ReferenceMismatch,
    check,
    runner,
)
from msattn.kernels.bench.full_size import error_at_full_size
from msattn.kernels.bench.rows import BenchRow, Shape, Work, throughput
from msattn.kernels.bench.timing import ceilings, compile_seconds, peak_memory_gb, time_ms
from msattn.kernels.operations import OPERATIONS

CASES: dict[str, Callable[[Shape, Options], Iterator[BenchCase]]] = {
    name: getattr(module, name)
    for name in OPERATIONS
    for module in (prefill_cases, decode_cases, clustering_cases, selection_cases)
    if hasattr(module, name)
}


def measure(operation: str, shape: Shape, options: Options) -> Iterator[BenchRow]:
    """Times an operation and its peers at each length.

    Yields each row as soon as it is measured: first the peers, then the operation that is compared
    with them. A peer that cannot run on this machine has no time, and a note with the reason. The
    length of ``shape`` is replaced by each of ``options.lengths``. Raises ReferenceMismatch if the
    operation disagrees with its reference at a small shape, before anything is timed, or at a shape
    just timed.
    """
    for case in CASES[operation](shape.small(), options):
        check(case, options.backward)
    for length in options.lengths:
        timer = _Timer(operation, replace(shape, length=length), options.backward)
        peer_rows: dict[Peer, BenchRow] = {}
        for case in CASES[operation](timer.shape, options):
            for peer in case.peers:
                if peer.name in options.peers and peer not in peer_rows:
                    peer_rows[peer] = timer.time_peer(peer, case)
                    yield peer_rows[peer]
            row = timer.time_operation(case, "msattn")
            peer_ms = {peer.name: peer_rows[peer].ms for peer in case.peers if peer in peer_rows}
            yield replace(
                row, times={name: ms / row.ms for name, ms in peer_ms.items() if ms and row.ms}
            )


def sweep(operation: str, shape: Shape, options: Options) -> Iterator[BenchRow]:
    """Times an operation with its shipped tiles, then with each candidate tile.

    Yields one row for each tile and case. A tile that fails or gives a wrong result has no time,
    and a note with the reason. Raises ReferenceMismatch if the operation with its shipped tiles
    disagrees with its reference.
    """
    for length in options.lengths:
        timer = _Timer(operation, replace(shape, length=length), options.backward)
        for candidate in (None, *list_candidates(operation, options.backward)):
            name = SHIPPED if candidate is None else variant_name(*candidate)
            override = nullcontext() if candidate is None else override_tile(*candidate)
            # the user has no tiles meanwhile
            with patch.object(tuned, "user_tiles", dict), override:
                try:
                    with compile_seconds() as seconds:
                        for case in CASES[operation](shape.small(), options):
                            check(case, options.backward)
                    for case in CASES[operation](timer.shape, options):
                        yield replace(
                            timer.time_operation(case, name), compile_s=max(seconds, default=None)
                        )
                except Exception as error:
                    if candidate is None and isinstance(error, ReferenceMismatch):
                        raise
                    yield replace(timer.row(name, "", 0.0), note=_not_timed(error))


class _Timer:
    """Times one operation and its peers at one shape."""

    def __init__(self, operation: str, shape: Shape, backward: bool) -> None:
        self.operation, self.shape, self.backward = operation, shape, backward
        on_cpu = f"CPU, {torch.get_num_threads()} threads"
        self.environment = {
            "device": on_cpu if shape.device == "cpu" else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": _triton_version(),
        }

    def time_operation(self, case: BenchCase, variant: str) -> BenchRow:
        """Times the operation, then compares it with its reference at the same size."""
        row = self.row(variant, case.setting, case.sparsity, case.queries)
        try:
            timed = self._time(case.call, case.layers, case.work, case.graph)
        except torch.OutOfMemoryError:
            return replace(row, note="not timed: out of memory")
        return replace(row, **timed, error=error_at_full_size(case, self.backward))

    def time_peer(self, peer: Peer, case: BenchCase) -> BenchRow:
        """Times a peer, and notes any exception, which third-party code may raise."""
        row = replace(
            self.row(peer.name, peer.setting, peer.sparsity, case.queries), note=peer.note
        )
        try:
            return replace(row, **self._time(peer.prepare(), peer.layers, peer.work, case.graph))
        except Exception as error:
            return replace(row, note=_not_timed(error))

    def _time(self, function: Function, layers: Any, work: Work, graph: bool) -> dict[str, Any]:
        shape = self.shape
        run = runner(function, layers, self.backward, graph, shape.device)
        took = time_ms(run, shape.device, budget_s=0.5 if shape.device == "cpu" else 5.0)
        median, q1, q3 = (ms / len(layers) for ms in took)
        memory = peak_memory_gb(
            runner(function, layers[:1], self.backward, False, shape.device), shape.device
        )
        rates = throughput(work, median, ceilings(shape.device, shape.dtype))
        return {"ms": median, "q1": q1, "q3": q3, "memory_gb": memory, **rates}

    def row(
        self, variant: str, setting: str, sparsity: float, queries: int | None = None
    ) -> BenchRow:
        """Returns a row without a time."""
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
            **self.environment,
        )


def _not_timed(error: Exception) -> str:
    """Returns the note of a row without a time: the first line of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"not timed: {lines[0][:200] if lines else type(error).__name__}"


def _triton_version() -> str:
    if find_spec("triton") is None:
        return ""
    import triton

    return triton.__version__
