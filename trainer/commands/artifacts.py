"""``msattn push`` and ``msattn import-gate``: artifacts go to the Hugging Face Hub, and released gates become artifacts."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msattn.trainer.artifacts import Artifact
    from msattn.trainer.methods.gate.decode_gate import Finished


def push(folder: str, repository: str, *, private: bool = False) -> str:
    """Uploads the artifacts in ``folder``, that of one or of a run, in one commit; prints and returns its URL."""
    from msattn.trainer import artifacts

    url = artifacts.push(repository, _held(Path(folder).expanduser()), private=private)
    print(url, flush=True)
    return url


def _held(folder: Path) -> "dict[str, Artifact]":
    """Returns the artifacts of a folder, checked, by their folders in the repository."""
    from msattn.trainer import artifacts
    from msattn.trainer.artifacts.manifest import MANIFEST

    found = artifacts.artifacts_of_run(folder)
    if os.path.isfile(folder / MANIFEST) or not found:
        return {"": artifacts.read(folder)}
    return {kind: artifacts.read(path, kind) for kind, path in found.items()}


def import_gate(source: str, folder: Path, *, overwrite: bool = False, finished_at: "Finished | None" = None) -> None:
    """Turns the released gates of SeerAttention's authors into an artifact; prints what it is, and how to try it."""
    from msattn.trainer.methods.gate.official import import_gate as run
    from msattn.trainer.progress import activity

    with activity(f"importing {source}"):
        gate = run(source, folder, overwrite=overwrite, finished_at=finished_at)
    cfg, shape = gate.cfg, gate.model_shape()
    layers, blocks, pools = f"{shape['num_layers']} layers", f"blocks of {cfg.block_size} tokens", "+".join(cfg.k_pool)
    if cfg.phase == "decode":
        what = f"decode gates of {layers} and {shape['num_kv_heads']} key/value heads, {blocks}, pooling {pools}"
        use = "keys=N (a budget of tokens), probes=N (blocks) or threshold=P (of a probability)"
    else:
        what = f"gates of {layers} and {shape['num_heads']} heads, {blocks}, poolings {'+'.join(cfg.q_pool)} and {pools}"
        use = "select=threshold (select.threshold, from 5e-4 to 5e-3) or select=topk (select.sparsity)"
    print(f"{folder}  {what}\nThey have no calibrated thresholds: use {use}.", flush=True)
