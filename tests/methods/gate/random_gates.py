"""Gates with random weights, and tokens to train them on."""

from typing import Any

import torch
from torch import Tensor, nn

from msattn.trainer.config import GateConfig
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from tests.factory import tiny_config

BLOCK = 16
FUNCTIONS = {"avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}


def config(**changes) -> GateConfig:
    return GateConfig(**{"block_size": BLOCK, **changes})


def noisy_gate(cfg: GateConfig, rope_type: str = "default", std: float = 0.5) -> Gate:
    """Gates with random weights, instead of the scaled identities of initialization."""
    gate = Gate.build(tiny_config(rope=rope_type), cfg)
    for parameter in gate.parameters():
        nn.init.normal_(parameter, std=std)
    return gate


def rotated(y: Tensor, inv_freq: Tensor, position: int) -> Tensor:
    """Applies the gate's RoPE to one vector."""
    angle = inv_freq * position
    a, b = y.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def topical_tokens(batch: int, blocks: int, seed: int) -> Tensor:
    """Blocks with one of 30 topics of two tokens, so that even the attention of a random model
    prefers some blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(0, 30, (batch, blocks, 1), generator=generator)
    return (
        1 + 4 * topics + torch.randint(0, 2, (batch, blocks, BLOCK), generator=generator)
    ).flatten(1)


def decode_config(**changes: Any) -> GateConfig:
    return GateConfig(**{"phase": "decode", "block_size": BLOCK, "loss": "kl", **changes})


def random_decode_gate(cfg: GateConfig | None = None, std: float = 0.3, **sizes: Any) -> DecodeGate:
    """Gates with random weights, instead of the scaled identities of initialization; always the
    same ones.
    """
    gate = DecodeGate.build(tiny_config(**sizes), cfg or decode_config())
    generator = torch.Generator().manual_seed(5)
    for parameter in gate.parameters():
        nn.init.normal_(parameter, std=std, generator=generator)
    return gate.requires_grad_(False)
