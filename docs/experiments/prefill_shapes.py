"""Times sparse attention of prompts beside FlashAttention 3 on the shapes of a published workload:
the second command of docs/serving.md, "Speed in vLLM".

    python docs/experiments/prefill_shapes.py cases.jsonl more.jsonl --sample 200

Each line of the files is a forward pass: ``query_lens``, ``prefix_lens`` (cached keys) and
``count`` (how often it occurred), as in ``datas/inference/prefill_cases_v1`` of MiniMax-AI/MSA. One
layer of the shape of Llama-3.1-8B in bf16 reads shuffled pages, with a gate of random weights that
leaves out ``--sparsity`` of the blocks. The time of msattn is that of a layer inside vLLM: undoing
RoPE, writing keys, pooling and choosing blocks, and attention; FlashAttention's is attention alone.
Needs the environment of vLLM, which has FlashAttention 3, and a Hopper GPU.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from msattn.kernels.bench.timing import time_ms
from msattn.trainer.config import GateConfig
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError, first_line, run_program
from msattn.trainer.evaluate.report.tables import with_columns
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.models.parallel import ModelShard
from msattn.trainer.serving.build import AttachOptions, ModelInfo, build_sparse
from msattn.trainer.serving.engines.vllm.metadata import Metadata
from msattn.trainer.serving.paged.state import PagedState

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
LIMITS = (32_768, 65_536, 131_072)  # of the longest sequence of a pass, for the table's rows


@dataclass(frozen=True)
class Shape:
    """The numbers of new and of cached tokens of each sequence of a pass."""

    queries: list[int]
    prefixes: list[int]
    count: int

    @property
    def keys(self) -> list[int]:
        return [sum(each) for each in zip(self.queries, self.prefixes, strict=True)]

    @property
    def group(self) -> str:
        below = [limit for limit in LIMITS if max(self.keys) <= limit]
        return f"up to {below[0]:,} keys" if below else f"more than {LIMITS[-1]:,}"


def read_shapes(files: Iterable[str]) -> list[Shape]:
    """Returns the shapes in the files; UserError for a line that is none."""
    shapes = []
    for file in files:
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                shape = Shape(row["query_lens"], row["prefix_lens"], row["count"])
                ok = min(shape.queries) > 0 and min(shape.prefixes) >= 0 < len(shape.keys)
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{file}, line {number}: {first_line(error)}") from error
            require(ok, f"{file}, line {number}", line, "expected new tokens in every sequence")
            shapes.append(shape)
    return shapes


class Layer:
    """One layer and its cache, for passes of any of the shapes."""

    def __init__(
        self, shapes: Sequence[Shape], *, sparsity: float, page_size: int, device: str
    ) -> None:
        self.page_size, self.device, self.dtype = page_size, device, torch.bfloat16
        config = LlamaConfig(
            hidden_size=HEADS * HEAD_SIZE,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            num_hidden_layers=1,
            max_position_embeddings=max(max(shape.keys) for shape in shapes),
        )
        torch.manual_seed(0)
        gate = Gate.build(config, GateConfig()).requires_grad_(False).to(device)
        info = ModelInfo(
            config=config,
            dtype=self.dtype,
            fingerprint=dict,
            shard=ModelShard,
            to_device=lambda *modules: torch.device(device),
        )
        options = AttachOptions(gate=gate, select="topk", sparsity=sparsity, dense_below=0)
        self.sparse = build_sparse(info, options)
        pages = max(sum(-(-keys // page_size) for keys in shape.keys) for shape in shapes)
        size = pages, page_size, KV_HEADS, HEAD_SIZE
        self.k, self.v = torch.randn(2, *size, dtype=self.dtype, device=device)
        kept = self.sparse.paged.state_options(config, max(len(x.queries) for x in shapes), 0)
        self.state = PagedState({0: (self.k, self.v)}, **kept)
        self.state.pooled[0].normal_()
        self.shuffled = torch.randperm(pages, dtype=torch.int32).to(device)

    def metadata(self, shape: Shape) -> CommonAttentionMetadata:
        """Returns vLLM's description of a pass."""
        counts = [-(-keys // self.page_size) for keys in shape.keys]
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=self.device)
        for row, pages in zip(table, self.shuffled[: sum(counts)].split(counts), strict=True):
            row[: len(pages)] = pages
        positions = [
            torch.arange(prefix, keys, device=self.device)
            for prefix, keys in zip(shape.prefixes, shape.keys, strict=True)
        ]
        slots = [
            own[at // self.page_size].long() * self.page_size + at % self.page_size
            for own, at in zip(table, positions, strict=True)
        ]
        starts = torch.tensor([0, *shape.queries]).cumsum(0, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(shape.keys, dtype=torch.int32, device=self.device),
            num_reqs=len(counts),
            num_actual_tokens=sum(shape.queries),
            max_query_len=max(shape.queries),
            max_seq_len=max(shape.keys),
            block_table_tensor=table,
            slot_mapping=torch.cat(slots),
        )

    def calls(self, shape: Shape) -> dict[str, Callable[[], Tensor]]:
        """Returns the attention of a pass, ``[T, Hq, D]``, by each of the two."""
        given = self.metadata(shape)
        q, k, v = (
            torch.randn(
                given.num_actual_tokens, heads, HEAD_SIZE, dtype=self.dtype, device=self.device
            )
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        rotation = self.sparse.rotation
        assert rotation is not None
        current = Metadata(self.sparse, self.state, given, rotation, [True], self.dtype)
        self.state.is_pooled.fill_(True)  # of prefixes; a pass forgets what it writes
        current.begin_pass()
        scale = HEAD_SIZE**-0.5

        def msattn() -> Tensor:
            x = current.inputs(0, q, k, v, scale=scale, softcap=None)
            return current.attend(x)[0].transpose(0, 1)

        return {
            "FlashAttention 3": lambda: flash_attention(q, self.k, self.v, given),
            "msattn": msattn,
        }


def flash_attention(q: Tensor, k: Tensor, v: Tensor, given: CommonAttentionMetadata) -> Tensor:
    """Returns vLLM's FlashAttention 3 of packed queries over pages."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, given.max_query_len, given.query_start_loc, given.max_seq_len,
        seqused_k=given.seq_lens, causal=True, block_table=given.block_table_tensor, fa_version=3,
    )  # fmt: skip


def measure(layer: Layer, shape: Shape, runs: int) -> dict[str, float]:
    """Returns the time of each attention, in milliseconds, and the share of the blocks read."""
    layer.sparse.statistics.clear()
    row = {
        name: time_ms(call, layer.device, repeats=runs).median
        for name, call in layer.calls(shape).items()
    }
    left_out, _ = layer.sparse.statistics.sparsity()
    return row | {"read": 1.0 if left_out is None else 1 - left_out}


def show(rows: list[tuple[Shape, dict[str, float]]]) -> None:
    """Prints the weighted mean of each group of passes, and of all."""
    groups = defaultdict[str, list[tuple[int, dict[str, float]]]](list)
    for shape, row in sorted(rows, key=lambda each: max(each[0].keys)):
        for name in (shape.group, "all"):
            groups[name].append((shape.count, row))
    every = groups.pop("all")
    headers = ["longest sequence", "shapes", "calls", "FA 3 (ms)", "msattn (ms)", "x", "read (%)"]
    table = with_columns(None, headers, headers[:1])  # in 80 columns
    for name, members in [*groups.items(), ("all", every)]:
        calls = sum(count for count, _ in members)
        flash, own, read = (
            sum(count * row[key] for count, row in members) / calls
            for key in ("FlashAttention 3", "msattn", "read")
        )
        cells = (
            f"{calls:,.0f}",
            f"{flash:.3f}",
            f"{own:.3f}",
            f"{flash / own:.2f}",
            f"{100 * read:.1f}",
        )
        table.add_row(name, str(len(members)), *cells)
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare attention on shapes of real prompts.")
    parser.add_argument("files", nargs="+", help="JSONL of query_lens, prefix_lens and count")
    parser.add_argument("--sample", type=int, help="only so many shapes, drawn at random")
    parser.add_argument("--sparsity", type=float, default=0.9, help="share of blocks left out")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    parser.add_argument("--runs", type=int, default=5, help="of which the median counts")
    args = parser.parse_args(arguments)
    shapes = read_shapes(args.files)
    if args.sample is not None:
        ok = 0 < args.sample <= len(shapes)
        require(ok, "--sample", args.sample, f"expected 1 to {len(shapes)}")
        shapes = random.Random(0).sample(shapes, args.sample)
    layer = Layer(shapes, sparsity=args.sparsity, page_size=args.page_size, device="cuda")
    show([(shape, measure(layer, shape, args.runs)) for shape in shapes])


if __name__ == "__main__":
    run_program(main)
