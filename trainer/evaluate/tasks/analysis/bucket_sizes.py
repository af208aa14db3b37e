"""Bucket sizes over prompts and positions, for partitions of keys before and after RoPE (SAAP,
figure 2).

Samples of equally many keys are drawn in four ways: from the training text, from all of the
held-out text, from one prompt, and from one range of positions of all prompts. The sizes of a
partition that generalizes deviate equally little in all of them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.methods.base import Method

REPEATS = 10  # samples of the training and of the held-out text, as in the paper
RANGES = 8  # ranges of positions
DIGITS = 4  # decimal places of stored sizes


def bucket_counts(buckets: Tensor, num_buckets: int) -> Tensor:
    """Returns the number of keys in each bucket: fp64 ``[H, C]`` for ``buckets [H, n]``."""
    flat = buckets.long() + num_buckets * torch.arange(len(buckets), device=buckets.device)[:, None]
    return (
        torch.bincount(flat.flatten(), minlength=len(buckets) * num_buckets)
        .view(len(buckets), num_buckets)
        .double()
    )


def deviation(counts: Tensor, expected: Tensor) -> Tensor:
    """Returns the root mean square over buckets of the difference in size, in units of the mean
    size: fp64 ``[H]``.

    ``counts`` and ``expected`` ``[H, C]`` are bucket counts of two samples, which may hold
    different numbers of keys.
    """
    difference = counts / counts.sum(-1, keepdim=True) - expected / expected.sum(-1, keepdim=True)
    return counts.shape[-1] * difference.square().mean(-1).sqrt()


def imbalance(counts: Tensor) -> Tensor:
    """Returns the expected size of a key's bucket relative to equal buckets,
    ``C sum_c n_c^2 / n^2``: fp64 ``[H]``.
    """
    return counts.shape[-1] * (counts / counts.sum(-1, keepdim=True)).square().sum(-1)


def samples(training: Tensor, heldout: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields ``(way, buckets [H, size])`` of samples without replacement, all of the same size.

    They are drawn from the buckets of keys of the training text ``[H, n]``, and of each held-out
    prompt ``[H, prompts, N]``.
    """
    draw = np.random.default_rng(seed)
    num_prompts, length = heldout.shape[1:]
    ranges = [part for part in heldout.tensor_split(min(RANGES, length), dim=2) if part.numel()]
    size = min(training.shape[1], length, num_prompts * (length // len(ranges)))

    def drawn(keys: Tensor) -> Tensor:
        return keys[:, torch.from_numpy(draw.choice(keys.shape[1], size, replace=False))]

    everywhere = heldout.flatten(1)
    for _ in range(REPEATS):
        yield "training text", drawn(training)
    for _ in range(REPEATS):
        yield "held-out text", drawn(everywhere)
    for prompt in heldout.unbind(1):
        yield "one prompt", drawn(prompt)
    for part in ranges:
        yield "one range of positions", drawn(part.flatten(1))


@dataclass
class SampledBuckets:
    """Buckets of training keys ``[H, n]`` and of the keys of each held-out prompt ``[H, N]``, by
    layer, of one partition.
    """

    partition: Method
    num_buckets: int
    seed: int
    training: dict[int, Tensor] = field(default_factory=dict)
    heldout: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def rows(self, length: int) -> Iterator[EvalRow]:
        """Yields a row for each way of sampling; the score is the mean deviation from the training
        text.
        """
        count, layers = self.num_buckets, sorted(self.heldout)
        # counts by way, layer and sample
        by_way: dict[str, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in layers])
        for i, layer in enumerate(layers):
            heldout = torch.stack(self.heldout[layer], dim=1)
            for way, buckets in samples(self.training[layer], heldout, self.seed):
                by_way[way][i].append(bucket_counts(buckets, count))
        expected = torch.stack([bucket_counts(self.training[layer], count) for layer in layers])[
            :, None
        ]
        for way, counted in by_way.items():
            # [layers, samples, H, C]
            counts = torch.stack([torch.stack(of_layer) for of_layer in counted])
            away = deviation(counts, expected)  # [layers, samples, H]
            by_size = counts.sort(-1, descending=True).values.mean((0, 1, 2))
            relative = count * by_size / by_size.sum()
            extra = {
                "length": length,
                "keys_per_sample": int(counts[0, 0, 0].sum()),
                "num_buckets": count,
                "imbalance": imbalance(counts).mean().item(),
                "layers": layers,
                "heads": away.mean(1).tolist(),
                "deviations": away.mean((0, 2)).tolist(),
                "sorted_sizes": [round(size, DIGITS) for size in relative.tolist()],
            }
            method = Method(f"buckets of {self.partition}", self.partition.label)
            prompts = len(self.heldout[layers[0]])
            score = away.mean().item()
            yield EvalRow(
                "analysis",
                method,
                Setting(way),
                score,
                "deviation of bucket sizes",
                samples=prompts,
                extra=extra,
            )
