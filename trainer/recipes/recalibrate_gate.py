"""Measures a trained gate's thresholds again, for ``select=calibrated``, and writes them into its
artifact.

``python -m msattn.trainer.recipes.recalibrate_gate FOLDER OVERRIDES`` takes the overrides of
``msattn train-gate`` that name the model and its training text. Use it for imported gates, which
have no thresholds, and to compare ways to distribute the blocks (``--by-layer``, ``--floor``) or to
weight mean-pooled scores (``--mean-weight``) on copies of an artifact.
"""

from dataclasses import replace
from typing import Any

from msattn.trainer import artifacts, data, models
from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import UserError, run_program
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores
from msattn.trainer.methods.gate.train import gate_thresholds
from msattn.trainer.methods.thresholds import CALIBRATION_CHUNKS, Allocation
from msattn.trainer.recipes import argument_parser
from msattn.trainer.training.distributed import rank_shard

OWN = GateScores.allocation


def main() -> None:
    """Calibrates the gate in FOLDER on the chunks that training left out for it, and replaces its
    artifact.
    """
    parser = argument_parser("recalibrate_gate", "Measure a gate's thresholds again.")
    parser.add_argument("folder", help="folder of the gate's artifact, which is replaced")
    parser.add_argument(
        "--by-layer", action="store_true", help="a threshold for each layer instead of one for all"
    )
    parser.add_argument(
        "--floor",
        type=float,
        default=OWN.floor,
        help="part of its top-k share that each row reads at least, 0 to 1",
    )
    parser.add_argument(
        "--mean-weight", type=float, help="new gate.mean_weight; default: unchanged"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="Hydra overrides of msattn train-gate: the model and its training text",
    )
    args = parser.parse_intermixed_args()
    if not 0 <= args.floor <= 1:
        raise UserError(f"--floor={args.floor:g}: expected a number from 0 to 1")
    if given := next((each for each in args.overrides if each.startswith("gate")), None):
        raise UserError(f"{given}: the gate keeps its settings; only --mean-weight changes one")
    cfg: Any = compose("train-gate", args.overrides)
    gate = Gate.load(args.folder)
    if args.mean_weight is not None:
        gate.cfg = replace(gate.cfg, mean_weight=args.mean_weight)
    assert gate.artifact is not None
    manifest = gate.artifact.manifest
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    artifacts.check_model(manifest, loaded.fingerprint, strict=True)
    _, chunks = data.chunks(cfg.data, loaded.tokenizer, seed=cfg.seed).split_off(CALIBRATION_CHUNKS)
    gate.to(loaded.model.device)
    allocation = Allocation(args.floor, pooled=not args.by_layer)
    gate.thresholds = gate_thresholds(
        gate, loaded.model, rank_shard(chunks, CALIBRATION_CHUNKS), allocation
    )
    facts = {key: manifest[key] for key in ("model", "data", "seed", "metrics")}
    if args.mean_weight is not None:  # recalls were measured with another weight
        facts["metrics"] = {
            name: value
            for name, value in facts["metrics"].items()
            if not name.startswith("recall/gate")
        }
    content = {
        "tensors": gate.artifact.tensors,
        "config": gate.artifact.config,
        "details": gate.details(),
    }
    artifacts.write(gate.artifact.path, kind="gate", overwrite=True, **content, **facts)


if __name__ == "__main__":
    run_program(main)
