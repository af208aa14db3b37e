"""The numbers of queries and of keys in a block."""

from typing import Any, NamedTuple

from msattn.trainer.config.values import require


class BlockSizes(NamedTuple):
    """Numbers of queries and of keys in a block; both are powers of two, and the keys divide the
    queries.
    """

    queries: int
    keys: int

    @classmethod
    def configured(cls, section: str, block_size: int, key_block_size: int | None) -> "BlockSizes":
        """Returns the sizes of a configuration, equal without a ``key_block_size``, which must
        divide the other.
        """
        keys = block_size if key_block_size is None else key_block_size
        divides = 0 < keys <= block_size and block_size % keys == 0
        require(
            divides,
            f"{section}.key_block_size",
            keys,
            f"expected {section}.block_size={block_size} or a part of it",
        )
        return cls(block_size, keys)

    @property
    def ratio(self) -> int:
        """Number of blocks of keys that hold as many keys as a block has queries."""
        return self.queries // self.keys

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of operations over blocks."""
        return {"block_size": self.queries, "key_block_size": self.keys}

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}"
