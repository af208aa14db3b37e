"""Plans: the architecture of a teacher and the stages of its training."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Training at one sequence length.

    Attributes
    ----------
    shares : shares of sequences with each task of :data:`msattn.trainer.data.tasks.sequences.NAMES`; the others are text.
    micro_batch : most sequences of a forward pass on a GPU; None: no limit.
    """

    seq_len: int
    batch_size: int
    steps: int
    shares: dict[str, float]
    schedule: str = "constant_with_warmup"
    warmup_steps: int = 100
    micro_batch: int | None = None

    def micro_batch_size(self, processes: int) -> int:
        """Returns the number of sequences of a forward pass when ``processes`` share the batch."""
        return min(self.micro_batch or self.batch_size, max(1, self.batch_size // processes))


@dataclass(frozen=True)
class Plan:
    """All settings of a teacher except the text and the tokenizer."""

    name: str
    architecture: dict[str, Any]
    stages: tuple[Stage, ...]
    lr: float
    weight_decay: float = 0.1
    beta2: float = 0.95
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500

    @property
    def tokens(self) -> int:
        return sum(stage.steps * stage.batch_size * stage.seq_len for stage in self.stages)


SHORT_TASKS = {"needles": 0.3, "several_values": 0.05, "several_keys": 0.08, "pairs": 0.12, "tracking": 0.1}
LONG_TASKS = {"needles": 0.22, "several_values": 0.03, "several_keys": 0.03, "pairs": 0.05, "tracking": 0.03, "copies": 0.02}
ALL_TASKS = {
    "needles": 0.18,
    "several_values": 0.08,
    "several_keys": 0.12,
    "pairs": 0.12,
    "tracking": 0.12,
    "common_words": 0.07,
    "frequent_words": 0.07,
}

# 5.8 million parameters, 4096 tokens: learns retrieval on short sequences with many tasks; the last stage is mostly text.
EMBEDDED = Plan(
    name="embedded",
    architecture={
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    },
    stages=(
        Stage(512, 256, 5000, {**SHORT_TASKS, "copies": 0.1}, warmup_steps=300),
        Stage(1024, 128, 800, {**SHORT_TASKS, "copies": 0.05}),
        Stage(4096, 48, 2000, LONG_TASKS, schedule="cosine"),
    ),
    lr=2e-3,
)

# 100 million parameters, 32,768 tokens, all tasks. Retrieval is learned on short sequences, where a step sees many exercises;
# later stages have as many tokens in a step.
LAB = Plan(
    name="lab",
    architecture={
        "hidden_size": 768,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    stages=(
        Stage(512, 128, 1500, {**ALL_TASKS, "copies": 0.06}, warmup_steps=200),
        Stage(1024, 64, 1500, {**ALL_TASKS, "copies": 0.03}, warmup_steps=50),
        Stage(4096, 16, 1600, ALL_TASKS, warmup_steps=50),
        Stage(16384, 4, 1200, ALL_TASKS, warmup_steps=20),
        Stage(32768, 2, 900, ALL_TASKS, schedule="cosine", warmup_steps=20),
    ),
    lr=1e-3,
    eval_every=1000,
)

PLANS = {plan.name: plan for plan in (EMBEDDED, LAB)}
