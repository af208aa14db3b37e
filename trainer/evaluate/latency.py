"""Time to the first token, dense beside sparse: what choosing blocks takes, what attention takes, where sparse breaks even.

Prompts are random tokens: time hangs on shapes, and on how many blocks are read. Each prompt fills a cache, as in ``generate``.
Dense attention runs behind the same hooks, by each of PyTorch's fast kernels; the rest of the model is the same.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from msattn.trainer.config import EvalRunConfig, GateConfig, SelectConfig
from msattn.trainer.evaluate.cost import cost
from msattn.trainer.evaluate.methods import Blocks, Methods
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models.sdpa import SDPA_BACKENDS, BackendUnavailable, use_backend
from msattn.trainer.models.tap import LayerInputs, dense_attention, tap
from msattn.trainer.models.timing import PhaseTimer
from msattn.trainer.seer.gate import Gate

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedModel

    from msattn.trainer.models.loading import Loaded

Figures = Callable[[], dict[str, Any]]  # what the passes since the context began did: sparsity, seconds of their parts


DENSE = "dense, "  # then the kernel's name


class Way(NamedTuple):
    """One line of the table: a method in a setting, SDPA's ``kernel`` meanwhile, and what makes the model attend so."""

    method: str
    setting: str
    kernel: str | None
    attached: Callable[[], AbstractContextManager[Figures]]


@dataclass(frozen=True)
class Run:
    """Prompts of one length by one method: seconds of each, peak MiB, and the seconds a prompt spends in its parts."""

    seconds: list[float]
    peak_mb: float
    sparsity: float | None
    selection_s: float
    attention_s: float

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def run(loaded: "Loaded", cfg: EvalRunConfig, methods: Methods, progress: "Progress") -> list[EvalRow]:
    """At each length a row for each dense kernel, and one for each block selection at each sparsity."""
    settings, model = cfg.eval.latency, loaded.model
    kernels = SDPA_BACKENDS[model.device.type]
    trained = any(block.gate for block in methods.blocks)
    blocks = methods.blocks if trained else [_untrained(cfg, model), *methods.blocks]
    plan = [(block, label, select) for block in blocks for label, select in block.settings(settings.sparsities)]
    ways = [Way(f"{DENSE}{name}", "", kernel, partial(_dense, model)) for name, kernel in kernels.items()]
    ways += [Way(block.name, label, None, partial(_sparse, model, block, select)) for block, label, select in plan]
    bar = progress.add_task("latency", total=len(ways) * len(settings.lengths))
    rows: list[EvalRow] = []
    for length in settings.lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(cfg.seed))
        done: list[tuple[Way, Run]] = []
        for way in ways:
            try:
                with use_backend(way.kernel):
                    done.append((way, measure(model, ids.to(model.device), way.attached, settings.seconds)))
            except BackendUnavailable as reason:
                methods.notes.append(f"{way.method} at {length:,} tokens, absent: {reason}")
            progress.advance(bar)
        dense = {way.method.removeprefix(DENSE): each.median_s for way, each in done if way.method.startswith(DENSE)}
        rows += [row(way.method, way.setting, length, each, dense) for way, each in done]
    return _with_break_even(rows, methods.notes)


def _untrained(cfg: EvalRunConfig, model: "PreTrainedModel") -> Blocks:
    """A gate as it is before training, which takes the time of a trained one."""
    presets = cfg.model.presets
    shape = GateConfig(
        block_size=cfg.select.block_size, q_pool=presets.gate_q_pool, k_pool=presets.gate_k_pool, rope=presets.gate_rope
    )
    policy = "topk" if cfg.select.policy == "calibrated" else cfg.select.policy  # thresholds come with training
    gate = Gate.build(model.config, shape).requires_grad_(False).to(model.device)
    return Blocks("gate, untrained", replace(cfg.select, policy=policy, scores="gate"), gate)


@contextmanager
def _dense(model: "PreTrainedModel") -> Iterator[Figures]:
    timer = PhaseTimer(model.device)

    def attend(x: LayerInputs) -> Tensor:
        with timer.measure("attention"):
            return dense_attention(x)

    with tap(model, attend):
        yield lambda: {"sparsity": None, "selection_s": None, "attention_s": timer.seconds("attention")}


@contextmanager
def _sparse(model: "PreTrainedModel", block: Blocks, select: SelectConfig) -> Iterator[Figures]:
    with block.attach(model, select, measure_time=True) as sparse:
        yield sparse.stats


@torch.inference_mode()
def first_token(model: "PreTrainedModel", ids: Tensor) -> Tensor:
    """The first choice after the prompt ``ids [1, N]``, its keys and values in a cache."""
    generate: Any = model
    return generate(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)


def measure(
    model: "PreTrainedModel", ids: Tensor, attached: Callable[[], AbstractContextManager[Figures]], seconds: float
) -> Run:
    """One run that finds kernels and memory unprepared, then measured ones until they took ``seconds``."""
    with attached():
        first_token(model, ids)
    taken: list[float] = []
    peaks: list[float] = []
    with attached() as figures:
        while sum(taken) < seconds:
            with cost(model.device) as spent:
                first_token(model, ids)
            taken.append(spent.seconds)
            peaks.append(spent.peak_mb)
        found = figures()
    parts = {part: (found[part] or 0.0) / len(taken) for part in ("selection_s", "attention_s")}
    return Run(taken, max(peaks), found["sparsity"], **parts)


def row(method: str, setting: str, length: int, done: Run, dense: dict[str, float]) -> EvalRow:
    """A run as a row; ``dense``: seconds of each dense kernel at the same length."""
    return EvalRow(
        task="latency",
        method=method,
        setting=setting,
        score=done.median_s,
        score_name="seconds to the first token",
        ratio_to_dense=done.median_s / min(dense.values()) if dense else None,
        sparsity=done.sparsity,
        selectivity=None if done.sparsity is None else 1 - done.sparsity,
        latency_s=done.median_s,
        peak_memory_mb=done.peak_mb,
        samples=len(done.seconds),
        extra={
            "length": length,
            "selection_s": done.selection_s,
            "attention_s": done.attention_s,
            "selection_share": done.selection_s / done.median_s,
            "attention_share": done.attention_s / done.median_s,
            **{f"times_{name}": seconds / done.median_s for name, seconds in dense.items()},
        },
    )


def _with_break_even(rows: list[EvalRow], notes: list[str]) -> list[EvalRow]:
    """The rows, with the length from which on their setting beats the fastest dense kernel; and a note on each setting."""
    found: dict[tuple[str, str], int | None] = {}
    for line in dict.fromkeys((each.method, each.setting) for each in rows if each.setting):
        ratios = {each.extra["length"]: each.ratio_to_dense for each in rows if (each.method, each.setting) == line}
        found[line] = tokens = break_even({length: ratio for length, ratio in ratios.items() if ratio})
        said = "at no length measured" if tokens is None else f"from {tokens:,} tokens on"
        notes.append(f"{line[0]}, {line[1]}: faster than the fastest dense attention {said}.")
    return [replace(each, extra=each.extra | {"break_even": found.get((each.method, each.setting))}) for each in rows]


def break_even(ratios: dict[int, float]) -> int | None:
    """Where the time over dense attention's falls below 1 for good, from ``{length: ratio}``; None where it does not.

    Between two lengths it lies on the straight line of both logarithms; a shorter one than was measured is not guessed.
    """
    lengths = sorted(ratios)
    slower = [i for i, length in enumerate(lengths) if ratios[length] >= 1]
    if not lengths or (slower and slower[-1] == len(lengths) - 1):
        return None
    if not slower:
        return lengths[0]
    low, high = lengths[slower[-1]], lengths[slower[-1] + 1]
    share = math.log(ratios[low]) / (math.log(ratios[low]) - math.log(ratios[high]))
    return math.ceil(low * (high / low) ** share)
