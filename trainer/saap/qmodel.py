"""SAAP's query classifiers: which buckets hold the keys that a query attends to (arXiv 2502.08246, section 4 and appendix A).

One small MLP for each layer and key/value head (or query head): ``D -> hidden -> C`` with batch norm and ReLU, from the query
before RoPE to a distribution over the buckets of :class:`~msattn.trainer.saap.kmeans.KMeans`. All heads go in batched products.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from msattn.kernels.probe_buckets import probe_buckets
from msattn.trainer import artifacts
from msattn.trainer.saap.index import slot_of
from msattn.trainer.saap.kmeans import KMeans

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1


class QModel(nn.Module):
    """Query classifiers and the partition they were trained for; a :class:`~msattn.trainer.saap.index.Router`.

    Parameters
    ----------
    partition : KMeans
        Copied along into the artifact; keys are assigned by it.
    num_heads : int
        Classifiers a layer: the number of key/value heads (shared by a query group) or of query heads.
    hidden : int
        Width of the hidden layer.
    residual : bool
        The network corrects plain routing: the products of query and centroids are added to its logits. The paper's figure 7
        names a residual form of the same capacity, and no formula; this one has the same weights and starts from k-means.
    seed : int
        A layer's first weights are drawn from (seed, layer).

    Attributes
    ----------
    artifact : Artifact or None
        What it was loaded from.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, partition: KMeans, num_heads: int, hidden: int, *, residual: bool = False, seed: int = 0) -> None:
        super().__init__()
        num_layers, kv_heads, num_buckets, head_dim = partition.centroids.shape
        if num_heads % kv_heads:
            raise ValueError(f"num_heads={num_heads}: expected a multiple of the partition's {kv_heads} key/value heads")
        self.partition = partition
        self.residual = residual
        self.layers, self.num_buckets, self.kv_heads = partition.layers, num_buckets, kv_heads
        heads = (num_layers, num_heads)
        self.weight_in = nn.Parameter(torch.empty(*heads, head_dim, hidden))  # [layers, H, D, F]
        self.gain = nn.Parameter(torch.ones(*heads, 1, hidden))
        self.shift = nn.Parameter(torch.zeros(*heads, 1, hidden))
        self.weight_out = nn.Parameter(torch.empty(*heads, hidden, num_buckets))  # [layers, H, F, C]
        self.bias_out = nn.Parameter(torch.zeros(*heads, 1, num_buckets))
        self.register_buffer("mean", torch.zeros(*heads, 1, hidden))
        self.register_buffer("variance", torch.ones(*heads, 1, hidden))
        for slot, layer in enumerate(self.layers):
            generator = torch.Generator().manual_seed(1_000_003 * seed + layer)
            for weight in (self.weight_in, self.weight_out):
                bound = weight.shape[-2] ** -0.5  # nn.Linear's
                nn.init.uniform_(weight[slot], -bound, bound, generator)
        self.artifact: artifacts.Artifact | None = None
        self._folded: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @classmethod
    def load(cls, path: str | Path) -> "QModel":
        """The query classifiers in a folder or on the Hub, ready to serve; UserError when there are none."""
        artifact = artifacts.read(path, kind="qmodel")
        details, tensors = artifact.manifest["details"], artifact.tensors
        partition = KMeans(tensors["partition.centroids"], details["layers"], details["rope"])
        with torch.device("meta"):
            qmodel = cls(partition, *tensors["weight_out"].shape[1:3], residual=details.get("residual", False))
        qmodel.load_state_dict(tensors, assign=True)
        qmodel.artifact = artifact
        return qmodel.requires_grad_(False).eval()

    @property
    def rope(self) -> bool:
        """Whether keys and queries are taken after RoPE."""
        return self.partition.rope

    def forward(self, queries: Tensor) -> Tensor:
        """Logits ``[layers, H, n, C]`` of all classifiers for queries ``[layers, H, n, D]``; n is the norm's batch."""
        hidden = queries @ self.weight_in
        mean, variance = self.mean, self.variance
        if self.training:
            rows = queries.shape[2]
            variance, mean = torch.var_mean(hidden.float(), dim=2, correction=0, keepdim=True)
            with torch.no_grad():
                self.mean.lerp_(mean, BATCH_NORM_MOMENTUM)
                self.variance.lerp_(variance * (rows / max(rows - 1, 1)), BATCH_NORM_MOMENTUM)  # unbiased, as BatchNorm1d's
        factor = self.gain * torch.rsqrt(variance + BATCH_NORM_EPS)
        normed = torch.addcmul(self.shift - mean * factor, hidden, factor)
        logits = normed.relu() @ self.weight_out + self.bias_out
        return logits + queries @ self.directions().mT if self.residual else logits

    def directions(self) -> Tensor:
        """The centroids that each classifier's buckets have: ``[layers, H, C, D]``."""
        return self.partition.centroids.repeat_interleave(self.weight_in.shape[1] // self.kv_heads, dim=1)

    def train(self, mode: bool = True) -> "QModel":
        """Switches modes as every module does; weights folded for serving are dropped."""
        self._folded.clear()
        return super().train(mode)

    def assign(self, layer: int, k_nope: Tensor, k: Tensor) -> Tensor:
        """The nearest centroid of each key: int32 ``[B, Hkv, N]``, as :meth:`KMeans.assign`."""
        return self.partition.assign(layer, k_nope, k)

    def scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Probabilities of one token's queries ``[B, Hq, 1, D]``, summed over the query group: fp32 ``[B, Hkv, C]``."""
        return self.head_scores(layer, q_nope, q).unflatten(1, (self.kv_heads, -1)).sum(2)

    def head_scores(self, layer: int, q_nope: Tensor, q: Tensor) -> Tensor:
        """Probabilities of one token's queries ``[B, Hq, 1, D]``, each query's own: fp32 ``[B, Hq, C]``."""
        queries = (q if self.rope else q_nope)[:, :, -1]
        weight_in, bias_in, weight_out, bias_out = self._serving(slot_of(self.layers, layer), queries.dtype)
        heads, batch = len(weight_in), len(queries)
        rows = queries.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)  # [H, B * queries a classifier, D]
        logits = torch.baddbmm(bias_out, torch.baddbmm(bias_in, rows, weight_in).relu(), weight_out)
        probs = logits.float().softmax(-1).unflatten(1, (batch, -1)).transpose(0, 1)  # [B, H, queries a classifier, C]
        return probs.flatten(1, 2)

    def probe(self, layer: int, q_nope: Tensor, q: Tensor, probes: int) -> Tensor:
        """The buckets with the highest :meth:`scores` for one token: int32 ``[B, Hkv, probes]``."""
        queries = (q if self.rope else q_nope)[:, :, -1:]
        weights = self._serving(slot_of(self.layers, layer), queries.dtype)
        return probe_buckets(queries, *weights, kv_heads=self.kv_heads, probes=probes)

    def _serving(self, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One layer's weights in ``dtype`` with the batch norm folded into the first product: two products serve a token.

        A residual classifier has 2 D hidden units more: relu(q) - relu(-q) = q meets the centroids.
        """
        if (slot, dtype) not in self._folded:
            factor = self.gain[slot] * torch.rsqrt(self.variance[slot] + BATCH_NORM_EPS)
            bias_in = self.shift[slot] - self.mean[slot] * factor
            weight_in, weight_out = self.weight_in[slot] * factor, self.weight_out[slot]
            if self.residual:
                centroids = self.directions()[slot]
                same = torch.eye(centroids.shape[2], dtype=weight_in.dtype, device=weight_in.device)
                same = same.expand(len(centroids), -1, -1)
                weight_in = torch.cat([weight_in, same, -same], dim=2)
                weight_out = torch.cat([weight_out, centroids.mT, -centroids.mT], dim=1)
                bias_in = pad(bias_in, (0, 2 * same.shape[2]))
            parts = (weight_in, bias_in, weight_out, self.bias_out[slot])
            self._folded[slot, dtype] = tuple(part.detach().to(dtype) for part in parts)  # type: ignore[assignment]
        return self._folded[slot, dtype]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """``.to(...)`` moves the weights: what was folded on the old device is dropped."""
        self._folded.clear()
        return super()._apply(fn, recurse)
