"""``msattn import-gate``: turns the released gates of SeerAttention's authors into an artifact."""

from pathlib import Path


def import_gate(source: str, folder: Path, *, overwrite: bool = False) -> None:
    """Writes the artifact and prints what it is, and the command that tries it.

    Raises
    ------
    UserError : as :func:`msattn.trainer.methods.gate.official.import_gate`.
    """
    from msattn.trainer.methods.gate.official import import_gate as run
    from msattn.trainer.progress import activity

    with activity(f"importing {source}"):
        gate = run(source, folder, overwrite=overwrite)
    cfg, shape = gate.cfg, gate.model_shape()
    layers, blocks, pools = f"{shape['num_layers']} layers", f"blocks of {cfg.block_size} tokens", "+".join(cfg.k_pool)
    if cfg.phase == "decode":
        what = f"decode gates of {layers} and {shape['num_kv_heads']} key/value heads, {blocks}, pooling {pools}"
        use = "keys=N (a budget of tokens), probes=N (blocks) or threshold=P (of a probability)"
    else:
        what = f"gates of {layers} and {shape['num_heads']} heads, {blocks}, poolings {'+'.join(cfg.q_pool)} and {pools}"
        use = "select=threshold (select.threshold, from 5e-4 to 5e-3) or select=topk (select.sparsity)"
    print(f"{folder}  {what}\nThey have no calibrated thresholds: use {use}.", flush=True)
