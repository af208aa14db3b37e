"""Distillation of the frozen model's attention into query classifiers: batches, loss and routing
recall (SAAP, section 4).

The batches of a layer depend only on the seed and the layer, and the gradients of heads are
independent. So layers that train together do not affect each other's result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.classifier.targets import QueryTargets

MAX_PROBES = 32  # largest number of probes for which routing recall is measured
RECALL_ROWS = 1024  # rows of a classifier evaluated at once


class Distiller(nn.Module):
    """Trains classifiers to minimize ``KL(target || classifier)``; only their weights are trained
    and saved.

    ``draw`` maps the ``batches`` of a forward pass to queries ``[layers, H, n, D]``, targets
    ``[layers, H, n, C]`` and the targets' entropy ``[layers, H, n]`` in nats, on the device of
    ``qmodel``. With ``bf16`` products are computed in bfloat16, as in the frozen model; weights,
    batch norm and loss stay in fp32.
    """

    def __init__(
        self,
        qmodel: QModel,
        draw: Callable[[Any], tuple[Tensor, Tensor, Tensor]],
        *,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.qmodel, self.draw, self.bf16 = qmodel, draw, bf16

    def forward(self, batches: Any) -> dict[str, Tensor | dict[str, Tensor]]:
        """Returns the loss for ``batches``, and its parts by layer: means over queries and
        heads.
        """
        queries, targets, entropy = self.draw(batches)
        with torch.autocast(queries.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.qmodel(queries.float())
        divergence = (cross_entropy(targets, logits) - entropy).mean(-1)  # [layers, H]
        total, mean = divergence.sum(), divergence.mean()
        parts = {
            f"layer {layer}": part
            for layer, part in zip(self.qmodel.layers, divergence.mean(-1), strict=True)
        }
        # The value is the mean, but the gradient is that of the sum, so that a head trains as if it
        # were alone.
        return {"loss": total + (mean - total).detach(), "parts": parts}


def cross_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """Returns ``-sum(targets * log_softmax(logits))`` over the last dimension, in fp32."""
    return -(targets * logits.log_softmax(-1, dtype=torch.float32)).sum(-1)


@torch.no_grad()
def routing_recall(
    qmodel: QModel, data: QueryTargets, probes: Sequence[int] | None = None
) -> dict[int, dict[str, float]]:
    """Measures the divergence and the mean attention mass in the selected buckets, by layer.

    ``probes`` are numbers of selected buckets, ascending; None means 1, 2, 4, ... up to
    :data:`MAX_PROBES`. For each layer the result has ``heldout_loss``, the mean of
    ``KL(target || classifier)`` on ``data`` in nats. For each number of probes L it has
    ``recall_qmodel@L`` (the buckets ranked highest by the classifier), ``recall_kmeans@L`` (those
    with the largest products of query and centroid) and ``recall_oracle@L`` (those with the most
    mass).
    """
    probes = probes or [2**i for i in range(min(MAX_PROBES, qmodel.num_buckets).bit_length())]
    max_probes = probes[-1]
    centroids = qmodel.head_centroids().mT
    sums = {
        name: torch.zeros(len(qmodel.layers), max_probes, device=centroids.device)
        for name in ("qmodel", "kmeans", "oracle")
    }
    divergence = torch.zeros(len(qmodel.layers), device=centroids.device)
    for offsets in torch.arange(int(data.count.max()), device=centroids.device).split(RECALL_ROWS):
        count = data.count[:, :, None]
        valid = offsets < count  # [layers, H, n]
        rows = data.start[:, :, None] + offsets.minimum(count - 1)
        queries, targets = data.queries[rows].float(), data.targets[rows].float()
        scores = {"qmodel": qmodel(queries), "kmeans": queries @ centroids, "oracle": targets}
        divergence += ((cross_entropy(targets, scores["qmodel"]) - data.entropy[rows]) * valid).sum(
            (1, 2)
        )
        for name, score in scores.items():
            mass = targets.gather(-1, score.topk(max_probes, dim=-1).indices).cumsum(-1)
            sums[name] += (mass * valid[..., None]).sum((1, 2))
    means = {name: (mass / data.count.sum(1, keepdim=True)).tolist() for name, mass in sums.items()}
    losses = (divergence / data.count.sum(1)).tolist()
    return {
        layer: {"heldout_loss": losses[index]}
        | {
            f"recall_{name}@{count}": means[name][index][count - 1]
            for count in probes
            for name in means
        }
        for index, layer in enumerate(qmodel.layers)
    }


def average_layers(layers: dict[int, dict[str, float]]) -> dict[str, float]:
    """Averages metrics over layers, and adds each layer's loss and its recalls with the most
    probes.
    """
    names = list(next(iter(layers.values())))
    means = {
        name: sum(metrics[name] for metrics in layers.values()) / len(layers) for name in names
    }
    max_probes = names[-1].rpartition("@")[2]
    by_layer = [name for name in names if name.rpartition("@")[2] in (max_probes, name)]
    return means | {
        f"{name}/layer {layer}": metrics[name]
        for layer, metrics in layers.items()
        for name in by_layer
    }
