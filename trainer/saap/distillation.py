"""Query classifiers in training: how batches are drawn, the loss, and how well what is learnt routes (SAAP, section 4).

A layer's batches come from the seed and its own number alone, and each head's gradient is its own: a layer trains the same
beside any others.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from msattn.trainer.saap.pairs import Pairs
from msattn.trainer.saap.qmodel import QModel

HEALTH_PROBES = 32
HEALTH_ROWS = 1024  # of a classifier at once
SALT = 0x9E3779B9  # keeps the hashes of small seeds and batch numbers apart from those of layers, heads and rows


def scattered(word: Any) -> Any:
    """A hash, exact on every device: 32-bit numbers, an int or an int64 Tensor, one to one onto such that look drawn at random.

    Both factors are below 2**31, so that no product leaves int64.
    """
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    word = ((word >> 16) ^ word) * 0x45D9F3B & 0xFFFFFFFF
    return (word >> 16) ^ word


class Draws(Dataset[dict[str, int]]):
    """Item i is the number that the batch i is drawn with, from (seed, i) alone."""

    def __init__(self, seed: int, length: int) -> None:
        self.seed, self.length = seed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"keys": scattered(scattered(self.seed ^ SALT) ^ index)}


class Distiller(nn.Module):
    """Classifiers in training: ``KL(target || classifier)``, on batches drawn from ``pairs``.

    Parameters
    ----------
    qmodel : trains; the only registered submodule, so the only thing saved.
    pairs : of the same layers and number of classifiers, on the same device.
    batch_queries : rows of a classifier that one key draws, with replacement.
    bf16 : products in bfloat16, as the frozen model's; weights, norm and loss stay in fp32.
    """

    def __init__(self, qmodel: QModel, pairs: Pairs, batch_queries: int, *, bf16: bool = False) -> None:
        super().__init__()
        self.qmodel, self.pairs, self.bf16 = qmodel, pairs, bf16
        device = pairs.queries.device
        layer, head, row = (
            torch.as_tensor(count, device=device)
            for count in (qmodel.layers, range(qmodel.weight_in.shape[1]), range(batch_queries))
        )
        streams = scattered(scattered(layer)[:, None] ^ head)
        self.streams = scattered(streams[:, :, None, None] ^ row)  # [layers, H, 1, n], the same in every group

    def draw(self, keys: Tensor) -> Tensor:
        """Rows of the pairs, int64 ``[layers, H, m * n]``, for ``keys`` int64 ``[m]``: uniform over each classifier's own."""
        start, count = self.pairs.start[:, :, None, None], self.pairs.count[:, :, None, None]
        place = scattered(self.streams ^ keys[:, None]) * count >> 32
        return (place + start).flatten(2)

    def forward(self, keys: Tensor) -> dict[str, Tensor | dict[str, Tensor]]:
        """Loss of the batches that ``keys`` int64 ``[m]`` draw, and each layer's part: means over queries and heads."""
        rows = self.draw(keys)
        gathered = (table.index_select(0, rows.flatten()) for table in (self.pairs.queries, self.pairs.targets))
        queries, targets = (values.view(*rows.shape, -1) for values in gathered)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.qmodel(queries.float())
        cross_entropy = -(targets * logits.log_softmax(-1, dtype=torch.float32)).sum(-1)
        divergence = (cross_entropy - self.pairs.entropy[rows]).mean(-1)  # [layers, H]
        total, shown = divergence.sum(), divergence.mean()
        parts = {f"layer {layer}": part for layer, part in zip(self.qmodel.layers, divergence.mean(-1), strict=True)}
        # The value is the mean; the gradient is the sum's, so that a head trains as if it were alone.
        return {"loss": total + (shown - total).detach(), "parts": parts}


@torch.no_grad()
def routing_recall(qmodel: QModel, pairs: Pairs) -> dict[int, dict[str, float]]:
    """For each layer, the mean attention mass in the buckets that a query visits, for 1, 2, 4, ... probes.

    ``recall_qmodel@L``: chosen by the classifier; ``recall_kmeans@L``: by products with the centroids; ``recall_oracle@L``: the
    heaviest.
    """
    most = min(HEALTH_PROBES, qmodel.num_buckets)
    directions = qmodel.directions().mT
    sums = {name: torch.zeros(len(qmodel.layers), most, device=directions.device) for name in ("qmodel", "kmeans", "oracle")}
    for some in torch.arange(int(pairs.count.max()), device=directions.device).split(HEALTH_ROWS):
        count = pairs.count[:, :, None]
        filled = some < count  # [layers, H, n]
        rows = pairs.start[:, :, None] + some.minimum(count - 1)
        queries, targets = pairs.queries[rows].float(), pairs.targets[rows].float()
        scores = {"qmodel": qmodel(queries), "kmeans": queries @ directions, "oracle": targets}
        for name, score in scores.items():
            mass = targets.gather(-1, score.topk(most, dim=-1).indices).cumsum(-1)
            sums[name] += (mass * filled[..., None]).sum((1, 2))
    means = {name: (mass / pairs.count.sum(1, keepdim=True)).tolist() for name, mass in sums.items()}
    probes = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return {
        layer: {f"recall_{name}@{count}": means[name][slot][count - 1] for count in probes for name in means}
        for slot, layer in enumerate(qmodel.layers)
    }


def over_layers(layers: dict[int, dict[str, float]]) -> dict[str, float]:
    """Figures averaged over layers, and beside them each layer's own: its loss, and its recalls with the most probes."""
    names = list(next(iter(layers.values())))
    means = {name: sum(figures[name] for figures in layers.values()) / len(layers) for name in names}
    most = names[-1].rpartition("@")[2]
    single = [name for name in names if name.rpartition("@")[2] in (most, name)]
    return means | {f"{name}/layer {layer}": figures[name] for layer, figures in layers.items() for name in single}
