"""From block scores to the blocks that are read."""

from dataclasses import dataclass, field

from msattn.trainer.config.values import one_of, power_of_two, require

POLICIES = ("topk", "calibrated", "threshold", "nucleus", "token_budget", "multiscale")
SCORES = ("gate", "oracle", "random", "sink_local", "mean_pool", "quest")


@dataclass(frozen=True)
class SelectConfig:
    """From block scores to the blocks that are read.

    Attributes
    ----------
    policy : ``topk``, ``calibrated``, ``threshold``, ``nucleus``, ``token_budget`` or ``multiscale``.
    scores : where scores come from: ``gate``, or a baseline.
    sparsity : share of the causally visible blocks that is not read, in [0, 1): of each row (``topk``), or of each layer
        on average (``calibrated``, by thresholds that the gate learned from text).
    threshold : smallest row-normalised score that is read (``threshold``).
    mass : probability to collect (``nucleus``).
    tokens : keys a query block may read (``token_budget``).
    shares : of the visible blocks, best first, that are read whole, at half, a quarter and an eighth of their tokens
        (``multiscale``); what is left is skipped.
    sink_blocks : first blocks that are always read.
    dense_below : prompts shorter than so many tokens are read densely, which is faster there, and counted in
        ``stats()["dense_by_choice"]``; a batch is as long as its longest prompt. ``auto``: what was measured on GPUs for gates
        at ``sparsity`` (:func:`msattn.kernels.tuned.break_even`); 0, never, on a CPU, for other scores and for policies
        without a sparsity.
        What ``msattn eval`` measures is always sparse.
    block_size : tokens a block for scores other than the gate's own.
    seed : of ``random``.
    """

    policy: str = "topk"
    scores: str = "gate"
    sparsity: float = 0.9
    threshold: float = 0.002
    mass: float = 0.95
    tokens: int = 1024
    shares: list[float] = field(default_factory=lambda: [0.1, 0.1, 0.2, 0.4])
    sink_blocks: int = 0
    dense_below: int | str = "auto"
    block_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("select.policy", self.policy, POLICIES)
        one_of("select.scores", self.scores, SCORES)
        require(0 <= self.sparsity < 1, "select.sparsity", self.sparsity, "in [0, 1)")
        require(0 <= self.threshold < 1, "select.threshold", self.threshold, "in [0, 1)")
        require(0 < self.mass <= 1, "select.mass", self.mass, "in (0, 1]")
        require(self.tokens > 0, "select.tokens", self.tokens, "a positive number of keys")
        fits = len(self.shares) == 4 and min(self.shares) >= 0 and 0 < sum(self.shares) <= 1 + 1e-9
        require(fits, "select.shares", self.shares, "four shares, for zoom 1, 2, 4 and 8, with a sum in (0, 1]")
        require(self.sink_blocks >= 0, "select.sink_blocks", self.sink_blocks, "0 or more")
        number = isinstance(self.dense_below, int) and self.dense_below >= 0
        require(number or self.dense_below == "auto", "select.dense_below", self.dense_below, "auto, or 0 or more tokens")
        ok = power_of_two(self.block_size) and 16 <= self.block_size <= 128
        require(ok, "select.block_size", self.block_size, "a power of two from 16 to 128")
