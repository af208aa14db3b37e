"""The attention backend of vLLM's CPU platform.

That platform uses the backend ``CPU_ATTN`` whatever was asked for. Its path leads here, where ``Backend`` is the class that was
asked for.
"""

from typing import Any

from msattn.trainer.serving.vllm.plugin import NAME


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from msattn.trainer.serving.vllm.backend import Backend

    config = get_current_vllm_config_or_none()
    asked = () if config is None else (config.attention_config.backend, *config.attention_config.backend_per_kind.values())
    return Backend if any(each is not None and each.name == NAME for each in asked) else CPUAttentionBackend
