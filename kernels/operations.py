"""Registry of operations.

The public API, bench, configuration, tests and documentation checks read it. ``msattn.kernels.<name>`` holds the function
``<name>``, and ``msattn.kernels.reference`` the same in plain PyTorch. This module imports nothing of msattn, so that the
command line can list operations at once.
"""

from typing import NamedTuple


class Operation(NamedTuple):
    """One operation; ``differentiable`` ones have a backward pass."""

    name: str
    differentiable: bool = False

    @property
    def module(self) -> str:
        """Dotted name of the module that exports the function."""
        return f"msattn.kernels.{self.name}"


_ALL = (
    Operation("maxpool_attention"),
    Operation("block_sparse_attention", differentiable=True),
    Operation("multiscale_attention", differentiable=True),
    Operation("conv_attention", differentiable=True),
    Operation("head_mix_attention", differentiable=True),
    Operation("bucket_decode"),
    Operation("probe_buckets"),
    Operation("flash_decode"),
    Operation("conv_decode"),
    Operation("bucket_mass"),
    Operation("merge_states"),
    Operation("nearest_centroid"),
    Operation("gate_scores"),
    Operation("pool_blocks"),
    Operation("best_blocks"),
)
OPERATIONS = {operation.name: operation for operation in _ALL}
DIFFERENTIABLE = tuple(operation.name for operation in _ALL if operation.differentiable)
