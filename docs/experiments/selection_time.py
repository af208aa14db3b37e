"""Times the selection of key blocks by a gate, beside sparse attention, on one GPU.

    python docs/experiments/selection_time.py    # a table, the kernels, errors

Shapes are those of Llama-3.1-8B in bf16: 32 query heads with a gate each, 8 key/value heads.
Weights are random and differ in scale from head to head, so that some heads are sharp and read
their best blocks, and others are flat and read what a threshold selects, a tenth of the blocks on
average. *Held* is ``gate_scores`` followed by ``best_blocks``, which hold the scores and a mask of
bytes. *Differing* is the share of the visible blocks that PyTorch in fp32 selects otherwise, in the
heads of two key/value heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bench.timing import peak_memory_gb, time_ms
from msattn.kernels.best_blocks import best_blocks
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.common.block_bits import unpack_blocks
from msattn.kernels.gate_blocks import gate_blocks
from msattn.kernels.gate_scores import gate_scores
from msattn.kernels.pool_blocks import pool_blocks
from msattn.kernels.reference.gate_blocks import gate_blocks as reference_blocks

HEADS, KV_HEADS, BLOCK, SHARE, FLOOR = 32, 8, 64, 0.1, 0.5
LIMIT = ("counts", "threshold", "exponent", "edge_exponent", "above")
LENGTHS, HEAD_SIZES, KEY_BLOCKS = (32_768, 131_072), (128, 64), (64, 16)


class Problem(NamedTuple):
    """A gate and what it selects, and the keys and values that attention reads."""

    gate: dict[str, Any]
    choice: dict[str, Any]
    k: Tensor
    v: Tensor
    keys: int

    def heads(self, count: int) -> "Problem":
        """Returns the problem of the first key/value heads."""
        part = {"q": HEADS, "q_rope": HEADS, "pooled_k": KV_HEADS}
        gate = self.gate | {
            name: self.gate[name][:, : heads * count // KV_HEADS].contiguous()
            for name, heads in part.items()
        }
        for name in ("query_weight", "key_weight"):
            gate[name] = gate[name][: HEADS * count // KV_HEADS]
        return self._replace(gate=gate)

    def select(self, **given: Any) -> Tensor:
        return gate_blocks(**self.gate, **self.choice, **given)

    def attend(self, mask: Tensor) -> Tensor:
        q = self.gate["q"]
        return block_sparse_attention(q, self.k, self.v, mask, key_block_size=self.keys).out


def draw(length: int, size: int, keys: int) -> Problem:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(1, HEADS, length, size, **options)
    k, v = torch.randn(2, 1, KV_HEADS, length, size, **options)
    sharpness = torch.linspace(0.5, 4, HEADS, device="cuda")[torch.randperm(HEADS)][:, None, None]
    weights = [
        torch.randn(HEADS, size, pools * size, device="cuda") * (BLOCK**0.5 / (pools * size)) ** 0.5
        for pools in (1, 2)
    ]
    gate = {
        "q": q,
        "pooled_k": pool_blocks(k, ["max", "min"], block_size=keys, rotated=k),
        "query_weight": weights[0] * sharpness,
        "key_weight": weights[1],
        "inv_freq": 500_000.0 ** -(torch.arange(0, size, 2, device="cuda") / size),
        "q_pool": ["avg"],
        "num_keys": length,
        "key_block_size": keys,
        "q_rope": q,
        "mean_weight": 0.5 * size**-0.5,
    }
    ratio, rows = BLOCK // keys, torch.arange(length // BLOCK, device="cuda")[:, None]
    seen = (rows + 1) * ratio
    choice = {
        "counts": (seen * (SHARE * FLOOR)).round().int()[None, None],
        "local": ((rows - 1).clamp(min=0) * ratio).int()[None, None],
        "sink_blocks": ratio,
        "exponent": -1.0,
        "edge_exponent": -0.5,
        "above": 3.0 * ratio,
    }
    problem = Problem(gate, choice, k, v, keys)
    scores = gate_scores(**problem.heads(KV_HEADS).gate)[0, :, -8:]  # of the longest rows
    least = scores.flatten().kthvalue(int((1 - SHARE) * scores.numel())).values
    choice["threshold"] = float(least) * scores.shape[-1]
    return problem


def masks(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns the visible blocks, and those that must be read, as ``best_blocks`` takes them."""
    local = problem.choice["local"]
    ratio, cols = BLOCK // problem.keys, -(-problem.gate["num_keys"] // problem.keys)
    c = torch.arange(cols, device="cuda")
    visible = c < ratio * torch.arange(1, local.shape[2] + 1, device="cuda")[:, None]
    return visible[None, None], visible & ((c < ratio) | (c >= local))


def ms(call: Callable[[], Any]) -> float:
    """Returns the median time of a call."""
    return time_ms(call, "cuda", repeats=5).median


def kernel_ms(call: Callable[[], Any], runs: int = 3) -> dict[str, float]:
    """Returns the time that a call spends in each kernel."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    times = {
        event.key: event.self_device_time_total / 1000 / runs for event in profile.key_averages()
    }
    return dict(sorted(times.items(), key=lambda item: -item[1])[:9])


def differing(problem: Problem) -> tuple[float, float]:
    """Returns the share of the visible blocks of some heads that PyTorch selects otherwise, and the
    share that is read.
    """
    part = problem.heads(2)
    blocks = -(-part.gate["num_keys"] // part.keys)
    visible, _ = masks(part)
    got, wanted = (
        unpack_blocks(selected, blocks)
        for selected in (part.select(), reference_blocks(**part.gate, **part.choice))
    )
    seen = visible.sum().item() * got.shape[1]
    return (got ^ wanted).sum().item() / seen, got.sum().item() / seen


def table() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    head = (
        "tokens,head,blocks,held_scores,held_choice,select,select_last,select_question,attention,"
    )
    print(head + "select/attention,select_gb,held_gb,differing,read")
    for size in HEAD_SIZES:
        for length in LENGTHS:
            for keys in KEY_BLOCKS:
                row(length, size, keys)


def row(length: int, size: int, keys: int) -> None:
    problem = draw(length, size, keys)
    visible, always = masks(problem)
    limit = {name: problem.choice[name] for name in LIMIT} | {"visible": visible, "always": always}
    scores = gate_scores(**problem.gate)
    wanted = best_blocks(scores, **limit)
    bits = problem.select()
    same = torch.equal(unpack_blocks(bits, visible.shape[3]), wanted)
    times = [
        ms(partial(gate_scores, **problem.gate)),
        ms(partial(best_blocks, scores, **limit)),
        ms(problem.select),
        ms(partial(problem.select, last_queries=True)),
    ]
    question = {
        "columns": scores[:, :, -1].contiguous(),
        "last_rows": scores[:, :, -2:].contiguous(),
        "whole": torch.tensor([[False, True]], device="cuda"),
    }
    del scores, wanted
    times += [ms(partial(problem.select, **question)), ms(partial(problem.attend, bits))]
    memory = [
        peak_memory_gb(problem.select, "cuda"),
        peak_memory_gb(lambda: best_blocks(gate_scores(**problem.gate), **limit), "cuda"),
    ]
    wrong, read = differing(problem)
    numbers = ",".join(f"{x:.3g}" for x in (*times, times[2] / times[-1], *memory))
    note = "" if same else "  DIFFERS FROM best_blocks(gate_scores)"
    print(f"{length},{size},{BLOCK}x{keys},{numbers},{wrong:.2g},{read:.3f}{note}", flush=True)
    if length == max(LENGTHS):
        for name, time in kernel_ms(lambda: problem.attend(problem.select())).items():
            print(f"    {time:8.3f} ms  {name[:90]}", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        table()
