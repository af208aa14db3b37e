"""The attention backend of vLLM's CPU platform.

That platform uses the backend ``CPU_ATTN`` whatever was asked for. Its path leads here, where
``Backend`` is the class that was asked for.
"""

from typing import Any

from msattn.trainer.serving.engines.vllm.plugin import backend_name


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from msattn.trainer.serving.engines.vllm.backend import Backend

    config = get_current_vllm_config_or_none()
    if config is None:
        return CPUAttentionBackend
    asked = config.attention_config
    by_kind = getattr(asked, "backend_per_kind", {})  # since vLLM 0.26
    return (
        Backend
        if AttentionBackendEnum[backend_name()] in (asked.backend, *by_kind.values())
        else CPUAttentionBackend
    )
