"""Time and memory of a gate training step on this machine, and of inference.

    python -m msattn.trainer.recipes.gate_cost [overrides of train-gate]

uses the model, chunk length and gate of ``msattn train-gate`` with random tokens, and times

    forward, <attention>   inference: the forward pass of the model, without logits
    forward, maxpool       the same with ``maxpool_attention`` as attention: the teacher's part of a step
    train-gate             a training step: forward pass, block maps, gradients of the gates, AdamW
    one graph              a step that keeps the losses of all layers in one autograd graph until one backward pass

Rows are written to ``outputs/<model.name>/<name>/cost/train_gate.csv``; during the run to ``train_gate.partial.csv`` beside it,
which remains if the run is interrupted.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msattn.kernels.bench.timing import peak_memory_gb, time_ms
from msattn.trainer import models
from msattn.trainer.commands.compose import compose
from msattn.trainer.config import TrainGateConfig
from msattn.trainer.errors import run_program
from msattn.trainer.evaluate.report.context import CPU_NOTE
from msattn.trainer.evaluate.report.tables import with_columns
from msattn.trainer.methods.blocks import visible_blocks
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.distillation import GateDistiller, gate_loss
from msattn.trainer.models.layer_attention import block_map
from msattn.trainer.models.tap import Attend, LayerInputs, run_backbone, tap
from msattn.trainer.models.timing import SDPA_BACKENDS, BackendUnavailable, use_backend
from msattn.trainer.recipes import argument_parser
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import written_rows

REPEATS = 3  # a step at 128k tokens takes over ten seconds
GB_PER_GIB = 2**30 / 1e9


@dataclass(frozen=True)
class CostRow:
    """One measurement; if it failed, ``seconds`` is None and ``note`` says why."""

    variant: str  # the run, see the module
    batch: int
    seq_len: int
    model: str
    device: str
    torch: str = torch.__version__
    seconds: float | None = None  # median
    peak_gib: float | None = None  # of device memory, weights included; None on a CPU
    over_inference: float | None = None  # ratio of seconds to the first forward pass
    over_maxpool: float | None = None  # ratio of seconds to the forward pass with maxpool_attention
    memory_over_inference: float | None = None
    note: str = ""


def measure(cfg: TrainGateConfig) -> Iterator[CostRow]:
    """Yields rows as they are measured; inference and maxpool come first."""
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    teacher, device = loaded.model, loaded.model.device
    models.check_length(teacher.config, cfg.data.seq_len)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    size = (cfg.train.least_micro_batch, cfg.data.seq_len)
    ids = torch.randint(len(loaded.tokenizer), size, generator=generator, device=device)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    empty = CostRow("", *size, cfg.model.name, device_name)

    inference: CostRow | None = None
    for name, kernel in SDPA_BACKENDS[device.type].items():
        row = _timed(replace(empty, variant=f"forward, {name}"), partial(_infer, teacher, ids), device, kernel)
        inference = inference or (row if row.seconds else None)
        yield _with_ratios(row, inference, None)
    with_maps = partial(_infer, teacher, ids, lambda x: block_map(x, cfg.gate.block_size, cfg.gate.target).out)
    maxpool = _timed(replace(empty, variant="forward, maxpool"), with_maps, device)
    yield _with_ratios(maxpool, inference, maxpool)

    gate = Gate.build(teacher.config, cfg.gate).to(device)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=cfg.train.lr, fused=True)
    distiller = GateDistiller(gate, teacher)
    for name, loss in (("train-gate", lambda: distiller(ids)["loss"]), ("one graph", partial(one_graph, gate, teacher, ids))):
        row = _timed(replace(empty, variant=name), partial(_step, loss, optimizer), device)
        yield _with_ratios(row, inference, maxpool)


@torch.no_grad()
def _infer(teacher: PreTrainedModel, ids: Tensor, attend: Attend | None = None) -> None:
    with tap(teacher, attend) if attend else nullcontext():
        run_backbone(teacher, ids)


def _step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    loss().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated during the next forward pass, as with accumulation


def one_graph(gate: Gate, teacher: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the loss of :class:`GateDistiller` with one graph over all layers."""
    losses = []

    def attention_with_loss(x: LayerInputs) -> Tensor:
        size = gate.cfg.block_size
        dense = block_map(x, size, gate.cfg.target)
        with torch.enable_grad():
            visible = visible_blocks(x.num_queries, x.num_keys, size, x.kv_start, x.q.device)
            losses.append(gate_loss(gate.logits(x), dense.pooled, visible, gate.cfg))
        return dense.out

    _infer(teacher, ids, attention_with_loss)
    return torch.stack(losses).sum()


def _timed(row: CostRow, call: Callable[[], None], device: torch.device, kernel: str | None = None) -> CostRow:
    """Returns ``row`` with time and peak memory of ``call``; SDPA uses ``kernel``."""
    try:
        with use_backend(kernel):
            took = time_ms(call, device.type, repeats=REPEATS, min_repeats=REPEATS)
            resident = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            allocated_gb = peak_memory_gb(call, device.type)
    except BackendUnavailable as error:
        return replace(row, note=str(error))
    peak_gib = None if allocated_gb is None else resident + allocated_gb / GB_PER_GIB
    return replace(row, seconds=took.median / 1e3, peak_gib=peak_gib)


def _with_ratios(row: CostRow, inference: CostRow | None, maxpool: CostRow | None) -> CostRow:
    """Returns ``row`` with its ratios to rows measured before."""

    def over(base: CostRow | None, figure: str) -> float | None:
        value, unit = getattr(row, figure), getattr(base, figure, None)
        return value / unit if value and unit else None

    of_inference, of_memory = over(inference, "seconds"), over(inference, "peak_gib")
    return replace(row, over_inference=of_inference, over_maxpool=over(maxpool, "seconds"), memory_over_inference=of_memory)


def cost(cfg: TrainGateConfig) -> Path:
    """Measures the cost, prints a table, and returns the CSV file of the rows, which replaces an earlier one."""
    from rich.console import Console

    console = Console()
    path = cfg.folder / "cost" / "train_gate.csv"
    partial = path.with_name("train_gate.partial.csv")
    rows: list[CostRow] = []
    with locked(path), console.status("inference") as status:
        for row in written_rows(measure(cfg), partial, asdict):
            rows.append(row)
            status.update(f"{row.variant}: done")
        partial.replace(path)
    _print_table(rows, console)
    console.print(f"Results: [bold]{path}[/bold]", soft_wrap=True)
    return path


def _print_table(rows: list[CostRow], console: Any) -> None:
    first = rows[0]
    title = f"{first.model}, {first.batch} x {first.seq_len:,} tokens; {first.device}"
    table = with_columns(title, ["", "s", "x inference", "x maxpool", "peak GiB", "x inference"], [""])
    for row in (row for row in rows if row.seconds):
        values = (row.seconds, row.over_inference, row.over_maxpool, row.peak_gib, row.memory_over_inference)
        table.add_row(row.variant, *("" if value is None else f"{value:.4g}" for value in values))
    console.print(table)
    notes = [f"{row.variant}: {row.note}" for row in rows if row.note]
    for note in (*notes, *([CPU_NOTE] if first.device.startswith("CPU") else [])):
        console.print(note, style="yellow", soft_wrap=True)


def main() -> None:
    parser = argument_parser("gate_cost", "Time a gate training step.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn train-gate")
    cost(compose("train-gate", parser.parse_args().overrides))


if __name__ == "__main__":
    run_program(main)
