"""Registry of operations.

The public API, bench, configuration, tests and documentation checks read it. An operation's
``module`` exports the function ``<name>``, and its ``reference`` the same in plain PyTorch. This
module imports nothing of msattn, so that the command line can list operations at once.
"""

from functools import partial
from typing import NamedTuple


class Operation(NamedTuple):
    """One operation; ``differentiable`` ones have a backward pass, ``softcap`` ones can cap scores,
    ``fp8`` ones read caches in FP8.
    """

    name: str
    differentiable: bool = False
    softcap: bool = False
    fp8: bool = False
    folder: str | None = None  # room of several operations, whose modules leave its name out
    beside: str | None = None  # operation whose module and reference have this one, too

    @property
    def module(self) -> str:
        """Dotted name of the module that exports the function."""
        if self.folder is None:
            return f"msattn.kernels.{self.beside or self.name}"
        return f"msattn.kernels.{self.folder}.{self.name.removeprefix(f'{self.folder}_')}"

    @property
    def reference(self) -> str:
        """Dotted name of the module with the same function in plain PyTorch."""
        if self.folder == "paged":
            return "msattn.kernels.reference.paged"
        room, _, module = self.module.rpartition(".")
        return f"{room}.reference.{module}"


_multi_token = partial(Operation, folder="multi_token")
_ALL = (
    Operation("maxpool_attention", softcap=True),
    Operation("block_sparse_attention", differentiable=True, softcap=True),
    Operation("paged_block_sparse_attention", softcap=True, fp8=True, folder="paged"),
    Operation("multiscale_attention", differentiable=True, softcap=True),
    _multi_token("conv_attention", differentiable=True),
    _multi_token("head_mix_attention", differentiable=True),
    Operation("bucket_decode", softcap=True),
    Operation("probe_buckets"),
    Operation("probe_centroids"),
    Operation("flash_decode", softcap=True),  # as a score_mod
    Operation("paged_bucket_decode", softcap=True, fp8=True, folder="paged"),
    Operation("paged_bucket_sizes", folder="paged"),
    Operation("paged_flash_decode", softcap=True, fp8=True, folder="paged"),
    _multi_token("conv_decode"),
    Operation("bucket_mass", softcap=True),
    Operation("merge_states"),
    Operation("nearest_centroid"),
    Operation("bucket_sums", beside="nearest_centroid"),
    Operation("gate_scores"),
    Operation("gate_blocks"),
    Operation("pool_blocks"),
    Operation("best_blocks"),
    Operation("block_softmax", differentiable=True, beside="best_blocks"),
)
OPERATIONS = {operation.name: operation for operation in _ALL}
DIFFERENTIABLE = tuple(operation.name for operation in _ALL if operation.differentiable)
SOFT_CAPPED = tuple(operation.name for operation in _ALL if operation.softcap)
IN_FP8 = tuple(operation.name for operation in _ALL if operation.fp8)
