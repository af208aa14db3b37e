"""Time and memory of a gate training step on this machine, and of inference; the first table of
docs/measurements.md, "Training at the size of Llama-3.1-8B".

    python docs/experiments/gate_cost.py [overrides of train-gate]

uses the model, chunk length and gate of ``msattn train-gate`` with random tokens, and times

    forward, <attention>   inference: the forward pass of the model, without logits
    forward, maxpool       the same with ``maxpool_attention`` as attention: the teacher's part
    train-gate             a training step: forward pass, block maps, gradients of the gates, AdamW
    one graph              a step that keeps the losses of all layers in one autograd graph

Rows are written to ``outputs/<model.name>/<name>/cost/train_gate.csv``.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
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
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import write_table

REPEATS = 3  # a step at 128k tokens takes over ten seconds
GB_PER_GIB = 2**30 / 1e9
MAXPOOL = "forward, maxpool"
Row = dict[str, Any]
# its name, a function that runs it, and the SDPA kernel that it uses
Variant = tuple[str, Callable[[], None], str | None]


def measure(cfg: TrainGateConfig) -> Iterator[Row]:
    """Yields a row for each variant as it is measured, with its ratios to the first forward pass
    and the one with maxpool.
    """
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    teacher, device = loaded.model, loaded.model.device
    models.check_length(teacher.config, cfg.data.seq_len)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    batch, seq_len = cfg.train.least_micro_batch, cfg.data.seq_len
    ids = torch.randint(len(loaded.tokenizer), (batch, seq_len), generator=generator, device=device)
    machine = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    facts = {
        "batch": batch,
        "seq_len": seq_len,
        "model": cfg.model.name,
        "device": machine,
        "torch": torch.__version__,
    }
    done: list[Row] = []
    for name, call, kernel in _variants(cfg, teacher, ids):
        done.append({"variant": name} | facts | _timed(call, device, kernel))
        inference = next((row for row in done if row["seconds"]), done[0])
        maxpool = next((row for row in done if row["variant"] == MAXPOOL), None)
        yield done[-1] | {
            "over_inference": _ratio(done[-1], inference, "seconds"),
            "over_maxpool": _ratio(done[-1], maxpool, "seconds"),
            "memory_over_inference": _ratio(done[-1], inference, "peak_gib"),
        }


def _variants(cfg: TrainGateConfig, teacher: PreTrainedModel, ids: Tensor) -> Iterator[Variant]:
    """Yields the variants: inference first, while there are no gates in memory."""
    for name, kernel in SDPA_BACKENDS[teacher.device.type].items():
        yield f"forward, {name}", partial(_infer, teacher, ids), kernel
    yield MAXPOOL, partial(_infer, teacher, ids, lambda x: block_map(x, cfg.gate.sizes).out), None
    gate = Gate.build(teacher.config, cfg.gate).to(teacher.device)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=cfg.train.lr, fused=True)
    distiller = GateDistiller(gate, teacher)
    yield "train-gate", partial(_step, lambda: distiller(ids)["loss"], optimizer), None
    yield "one graph", partial(_step, partial(one_graph, gate, teacher, ids), optimizer), None


@torch.no_grad()
def _infer(teacher: PreTrainedModel, ids: Tensor, attend: Attend | None = None) -> None:
    with tap(teacher, attend) if attend else nullcontext():
        run_backbone(teacher, ids)


def _step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    loss().backward()
    optimizer.step()
    # gradients stay allocated during the next forward pass, as with accumulation
    optimizer.zero_grad(set_to_none=False)


def one_graph(gate: Gate, teacher: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the loss of :class:`GateDistiller` with one graph over all layers."""
    losses = []

    def attention_with_loss(x: LayerInputs) -> Tensor:
        dense = gate.true_map(x)
        with torch.enable_grad():
            visible = visible_blocks(x, gate.cfg.sizes)
            losses.append(gate_loss(gate.logits(x), dense.pooled, visible, gate.cfg))
        return dense.out

    _infer(teacher, ids, attention_with_loss)
    return torch.stack(losses).sum()


def _timed(call: Callable[[], None], device: torch.device, kernel: str | None) -> Row:
    """Returns median seconds and peak GiB of device memory, weights included (None on a CPU), or
    why there are none.
    """
    try:
        with use_backend(kernel):
            took = time_ms(call, device.type, repeats=REPEATS, min_repeats=REPEATS)
            resident = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            allocated_gb = peak_memory_gb(call, device.type)
    except BackendUnavailable as error:
        return {"seconds": None, "peak_gib": None, "note": str(error)}
    peak_gib = None if allocated_gb is None else resident + allocated_gb / GB_PER_GIB
    return {"seconds": took.median / 1e3, "peak_gib": peak_gib, "note": ""}


def _ratio(row: Row, base: Row | None, figure: str) -> float | None:
    return row[figure] / base[figure] if base and row[figure] and base[figure] else None


def cost(cfg: TrainGateConfig) -> Path:
    """Measures the cost, prints a table, and returns the CSV file of the rows, which replaces an
    earlier one.
    """
    console = Console()
    path = cfg.folder / "cost" / "train_gate.csv"
    rows: list[Row] = []
    with locked(path), console.status("inference") as status:
        for row in measure(cfg):
            rows.append(row)
            status.update(f"{row['variant']}: done")
        write_table(path, rows)
    first = rows[0]
    title = f"{first['model']}, {first['batch']} x {first['seq_len']:,} tokens; {first['device']}"
    table = with_columns(
        title, ["", "s", "x inference", "x maxpool", "peak GiB", "x inference"], [""]
    )
    for row in (row for row in rows if row["seconds"]):
        figures = [
            row[name]
            for name in (
                "seconds",
                "over_inference",
                "over_maxpool",
                "peak_gib",
                "memory_over_inference",
            )
        ]
        table.add_row(
            row["variant"], *("" if value is None else f"{value:.4g}" for value in figures)
        )
    console.print(table)
    notes = [f"{row['variant']}: {row['note']}" for row in rows if row["note"]]
    for note in (*notes, *([CPU_NOTE] if first["device"].startswith("CPU") else [])):
        console.print(note, style="yellow", soft_wrap=True)
    console.print(f"Results: [bold]{path}[/bold]", soft_wrap=True)
    return path


def main() -> None:
    parser = ArgumentParser(description="Time a gate training step.")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn train-gate")
    cost(compose("train-gate", parser.parse_args().overrides))


if __name__ == "__main__":
    run_program(main)
