"""``msattn import-gate``: turns the released gates of SeerAttention's authors into an artifact."""

from pathlib import Path


def import_gate(source: str, folder: Path, *, overwrite: bool = False) -> None:
    """Writes the artifact and prints what it is, and the command that tries it.

    Raises
    ------
    UserError : as :func:`msattn.trainer.seer.official.import_gate`.
    """
    from msattn.trainer.progress import activity
    from msattn.trainer.seer.official import import_gate as run

    with activity(f"importing {source}"):
        gate = run(source, folder, overwrite=overwrite)
    cfg, shape = gate.cfg, gate.model_shape()
    print(
        f"{folder}  gates of {shape['num_layers']} layers and {shape['num_heads']} heads, blocks of {cfg.block_size} tokens, "
        f"poolings {'+'.join(cfg.q_pool)} and {'+'.join(cfg.k_pool)}\n"
        "They have no calibrated thresholds: use select=threshold (select.threshold, from 5e-4 to 5e-3) or select=topk "
        "(select.sparsity).",
        flush=True,
    )
