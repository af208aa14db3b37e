"""Query classifiers, which predict the buckets that a query attends to (SAAP, arXiv 2502.08246,
section 4 and appendix A).

A classifier is a small MLP ``D -> hidden -> C`` with batch norm and ReLU, one for each layer and
key/value head (or query head). It maps a query before RoPE to a distribution over the buckets of
``KMeans``. All heads are computed in batched products.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from msattn.kernels.probe_buckets import probe_buckets
from msattn.trainer import artifacts
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.buckets import BucketRouter, Buckets, layer_index
from msattn.trainer.methods.budgets import Budget, KeyShare, Probability
from msattn.trainer.methods.classifier.kmeans import KMeans, router_details
from msattn.trainer.models.families import check_shape, num_kv_heads
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.parallel import ModelShard

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1


class QModel(BucketRouter, artifacts.ArtifactModule):
    """Query classifiers and the partition that they are trained for.

    Parameters
    ----------
    partition : assigns keys to buckets; a part of the artifact.
    num_heads : classifiers of each layer: the number of key/value heads (one for a query group) or
        of query heads.
    hidden : width of the hidden layer.
    residual : adds the products of query and centroids to the logits, so that the network learns a
        correction to k-means routing. Figure 7 of the paper mentions a residual form of the same
        capacity without a formula; this form has the same weights.
    seed : the initial weights of a layer depend on (seed, layer) alone.

    Attributes
    ----------
    thresholds : of :func:`msattn.trainer.methods.key_thresholds.calibrate_keys`; None before
        training.
    """

    mean: Tensor
    variance: Tensor

    method = Method(
        "classifier", trained=True, style={"color": "#D55E00", "marker": "o"}, other_color="#F0A07C"
    )
    predicts_attention = True

    def __init__(
        self,
        partition: KMeans,
        num_heads: int,
        hidden: int,
        *,
        residual: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        num_layers, kv_heads, num_buckets, head_dim = partition.centroids.shape
        if num_heads % kv_heads:
            raise ValueError(
                f"num_heads={num_heads}: expected a multiple of the partition's {kv_heads} "
                f"key/value heads"
            )
        self.partition = partition
        self.residual, self.rope = residual, partition.rope
        self.layers, self.num_buckets, self.kv_heads = partition.layers, num_buckets, kv_heads
        heads = (num_layers, num_heads)
        self.weight_in = nn.Parameter(torch.empty(*heads, head_dim, hidden))  # [layers, H, D, F]
        self.gain = nn.Parameter(torch.ones(*heads, 1, hidden))
        self.shift = nn.Parameter(torch.zeros(*heads, 1, hidden))
        # [layers, H, F, C]
        self.weight_out = nn.Parameter(torch.empty(*heads, hidden, num_buckets))
        self.bias_out = nn.Parameter(torch.zeros(*heads, 1, num_buckets))
        self.register_buffer("mean", torch.zeros(*heads, 1, hidden))
        self.register_buffer("variance", torch.ones(*heads, 1, hidden))
        for index, layer in enumerate(self.layers):
            generator = torch.Generator().manual_seed(1_000_003 * seed + layer)
            for weight in (self.weight_in, self.weight_out):
                bound = weight.shape[-2] ** -0.5  # as in nn.Linear
                nn.init.uniform_(weight[index], -bound, bound, generator)
        self._folded: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @classmethod
    def load(cls, path: str | Path) -> "QModel":
        """Loads a qmodel artifact, frozen and in evaluation mode; UserError if it is missing,
        damaged or of another kind.
        """
        artifact = artifacts.read(path, kind="qmodel")
        details, centroids = router_details(artifact, "partition.centroids")
        tensors, weight_out = artifact.tensors, artifact.tensors.get("weight_out")
        # classifiers of a layer
        accepted = [artifact.manifest["model"][name] for name in ("num_heads", "num_kv_heads")]
        if weight_out is None or weight_out.ndim != 4 or weight_out.shape[1] not in accepted:
            raise UserError(
                f"artifact {path}: expected a tensor weight_out [layers, heads, hidden, buckets]"
            )
        with torch.device("meta"):
            partition = KMeans(torch.empty(centroids), details.layers, details.rope)
            qmodel = cls(partition, *weight_out.shape[1:3], residual=details.residual)
        artifacts.check_tensors(
            artifact, {name: tensor.shape for name, tensor in qmodel.state_dict().items()}
        )
        qmodel.load_state_dict(tensors, assign=True)
        qmodel.artifact, qmodel.thresholds = artifact, details.thresholds
        qmodel.routing_warning = routing_warning(
            artifact.manifest["metrics"], details.serving.probes
        )
        return qmodel.requires_grad_(False).eval()

    def shard(self, part: ModelShard) -> "QModel":
        """Returns the classifiers and the partition of the layers and heads of a rank."""
        heads, hidden = self.weight_in.shape[1] // part.ranks, self.weight_in.shape[3]
        own = QModel(self.partition.shard(part), heads, hidden, residual=self.residual)
        rows = part.rows(self.layers)
        own.load_state_dict({name: part.of(x[rows], 1) for name, x in self.state_dict().items()})
        own.artifact, own.thresholds = self.artifact, self.thresholds
        return own.requires_grad_(False).eval()

    @property
    def assigner(self) -> KMeans:
        return self.partition

    def check_model(self, config: Any) -> None:
        self.partition.check_model(config)
        heads = self.weight_in.shape[1]
        if heads != num_kv_heads(config):
            check_shape("qmodel", {"num_heads": heads}, config)
        super().check_model(config)

    def forward(self, queries: Tensor) -> Tensor:
        """Returns the logits ``[layers, H, n, C]`` for queries ``[layers, H, n, D]``; batch norm is
        over n.
        """
        hidden = queries @ self.weight_in
        mean, variance = self.mean, self.variance
        if self.training:
            rows = queries.shape[2]
            variance, mean = torch.var_mean(hidden.float(), dim=2, correction=0, keepdim=True)
            with torch.no_grad():
                self.mean.lerp_(mean, BATCH_NORM_MOMENTUM)
                # unbiased, as in BatchNorm1d
                self.variance.lerp_(variance * (rows / max(rows - 1, 1)), BATCH_NORM_MOMENTUM)
        factor = self.gain * torch.rsqrt(variance + BATCH_NORM_EPS)
        normed = torch.addcmul(self.shift - mean * factor, hidden, factor)
        logits = normed.relu() @ self.weight_out + self.bias_out
        return logits + queries @ self.head_centroids().mT if self.residual else logits

    def head_centroids(self) -> Tensor:
        """Returns the centroids of each classifier's buckets: ``[layers, H, C, D]``."""
        return self.partition.centroids.repeat_interleave(
            self.weight_in.shape[1] // self.kv_heads, dim=1
        )

    def train(self, mode: bool = True) -> "QModel":
        """Sets the mode and drops the folded weights, which training would make stale."""
        self._folded.clear()
        return super().train(mode)

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """Returns the nearest centroid of each key, as :meth:`KMeans.assign`."""
        return self.partition.assign(layer, k_nope, k)

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Returns the probabilities of the buckets."""
        queries = (q if self.rope else q_nope)[:, :, -1]
        weight_in, bias_in, weight_out, bias_out = self._folded_weights(
            layer_index(self.layers, layer), queries.dtype
        )
        heads, batch = len(weight_in), len(queries)
        # [H, B * queries per classifier, D]
        rows = queries.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
        logits = torch.baddbmm(bias_out, torch.baddbmm(bias_in, rows, weight_in).relu(), weight_out)
        # [B, H, queries per classifier, C]
        probs = logits.float().softmax(-1).unflatten(1, (batch, -1)).transpose(0, 1)
        return probs.flatten(1, 2)

    def visit(
        self,
        x: LayerInputs,
        budget: Budget,
        buckets: Buckets,
        *,
        window: int | Tensor = 0,
        by_head: bool = False,
    ) -> Tensor:
        if by_head or isinstance(budget, Probability):
            return super().visit(x, budget, buckets, window=window, by_head=by_head)
        queries = (x.q if self.rope else x.q_nope)[:, :, -1:]
        weights = self._folded_weights(layer_index(self.layers, x.layer), queries.dtype)
        density: dict[str, Any] = (
            {"sizes": buckets.sizes(), "threshold": budget.density}
            if isinstance(budget, KeyShare)
            else {}
        )
        return probe_buckets(
            queries, *weights, kv_heads=self.kv_heads, probes=budget.most, **density
        )

    def _folded_weights(
        self, index: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns one layer's weights in ``dtype``, with batch norm folded into the first product.

        A residual classifier gets 2 D more hidden units, relu(q) and relu(-q); their difference, q,
        multiplies the centroids.
        """
        if (index, dtype) not in self._folded:
            factor = self.gain[index] * torch.rsqrt(self.variance[index] + BATCH_NORM_EPS)
            bias_in = self.shift[index] - self.mean[index] * factor
            weight_in, weight_out = self.weight_in[index] * factor, self.weight_out[index]
            if self.residual:
                centroids = self.head_centroids()[index]
                identity = torch.eye(
                    centroids.shape[2], dtype=weight_in.dtype, device=weight_in.device
                )
                identity = identity.expand(len(centroids), -1, -1)
                weight_in = torch.cat([weight_in, identity, -identity], dim=2)
                weight_out = torch.cat([weight_out, centroids.mT, -centroids.mT], dim=1)
                bias_in = pad(bias_in, (0, 2 * identity.shape[2]))
            weights = (weight_in, bias_in, weight_out, self.bias_out[index])
            self._folded[index, dtype] = tuple(weight.detach().to(dtype) for weight in weights)  # type: ignore[assignment]
        return self._folded[index, dtype]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Drops the folded weights, which are on the old device, and applies ``fn`` to the others
        (``Module.to``).
        """
        self._folded.clear()
        return super()._apply(fn, recurse)


def routing_warning(metrics: Mapping[str, Any], probes: int | None) -> str | None:
    """Returns a warning if classifiers find less held-out attention mass than their k-means alone,
    else None.

    The training ``metrics`` have ``recall_qmodel@L`` and ``recall_kmeans@L`` for some numbers L of
    buckets. The largest L up to ``probes``, the number read in serving, decides; with None the
    largest L of all.
    """
    measured = sorted(
        int(name[14:]) for name in metrics if re.fullmatch(r"recall_qmodel@[0-9]{1,6}", name)
    )
    count = max(
        (buckets for buckets in measured if buckets <= (probes or buckets)),
        default=min(measured, default=None),
    )
    own, kmeans = metrics.get(f"recall_qmodel@{count}"), metrics.get(f"recall_kmeans@{count}")
    if not isinstance(own, int | float) or not isinstance(kmeans, int | float) or own >= kmeans:
        return None
    return (
        f"the classifiers route worse than their k-means alone: {own:.1%} of the held-out "
        f"attention mass in {count} buckets, k-means {kmeans:.1%}; train them longer (train.steps) "
        "or on more prompts, or route with the kmeans artifact"
    )
