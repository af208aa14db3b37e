"""Compares block selections: gates and all methods without training, at the same sparsities or
shares, on the same samples.

    python docs/experiments/comparison.py OUT OVERRIDES --lengths 2048 4096 8192 \\
        --gates outputs/smollm2/*/gate

With ``--shares 0.2 0.1`` every method asks for the sparsities at which it reads these shares of the
keys of the chunks of perplexity, within 2 % of the share, under the calibrated policy. They are
also written, for ``docs/experiments/long_code.py``.

OVERRIDES are those of ``msattn eval``: the model, its training text, ``eval.perplexity.*``,
``eval.ruler.*`` and ``eval.leval.*``. At each length, perplexity with KL divergence and agreement,
RULER and, with ``eval.leval.path``, L-Eval are measured for each method under each policy. Several
processes share the work and the GPUs, one task at one length at a time: of dense attention first,
with which the methods are then compared. Measurements are kept in ``OUT/<model>-<lengths>``; the
same command continues after an interruption, also with further gates.

``OUT/comparison.csv`` holds the rows of all models and lengths that are complete: ``model``,
``select``, and the columns of ``msattn eval``. Rows of gates are named by the folder of their run,
or with ``--seeds`` by their ``seed``. They also have the paired difference to the best method
without training at the same sparsity and policy: ``best_untrained``, ``over_best`` and its 95 %
interval. ``comparison.csv``, ``qwen.csv`` and ``blocks.csv`` in docs/figures are such files, from
which ``python docs/figures/draw.py`` writes tables of docs/results.md and docs/measurements.md.
"""

import csv
import json
import multiprocessing
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msattn.trainer import artifacts, models
from msattn.trainer.commands.compose import compose
from msattn.trainer.config.select import BASELINES, GATE_SCORES
from msattn.trainer.errors import run_program
from msattn.trainer.evaluate.calibration import calibrate_selections
from msattn.trainer.evaluate.compared import Compared, ComparedSelection
from msattn.trainer.evaluate.job import Job, PartialRows, settings_of
from msattn.trainer.evaluate.row import EvalRow, Setting, flat
from msattn.trainer.evaluate.task import prepare, task_module, task_of
from msattn.trainer.evaluate.tasks.perplexity import heldout_chunks, prefill
from msattn.trainer.methods.base import DENSE
from msattn.trainer.methods.gate.attn_gate import GATE_SCORERS, Gate
from msattn.trainer.methods.thresholds import SPARSITIES
from msattn.trainer.methods.untrained import untrained_scorer
from msattn.trainer.progress import Progress
from msattn.trainer.storage.lock import locked_in_turn
from msattn.trainer.storage.replace import replace_file, write_table

POLICIES = ("calibrated", "topk")
TASKS = ("perplexity", "ruler", "leval")
# relative difference from a share up to which it is met; tries to meet it
CLOSE, MOST_TRIES = 0.02, 10


@dataclass(frozen=True)
class Part:
    """One unit of work for a process: a task at one length, for a method under a policy or dense
    attention.
    """

    name: str
    out: Path
    overrides: tuple[str, ...]
    length: int
    task: str
    policy: str = POLICIES[0]
    scores: str | None = None  # block scores of the gate or of a baseline; None: dense attention
    gate: Path | None = None
    # shares of the keys that are to be read; (): sparsities as configured
    shares: tuple[float, ...] = ()
    # the rows of a gate have the seed of its training instead of the name of its run
    seeds: bool = False
    dense: tuple[EvalRow, ...] = ()  # rows of dense attention


@cache
def _loaded(overrides: tuple[str, ...]) -> Any:
    """Returns the model; a process loads it once."""
    cfg: Any = compose("eval", overrides)
    return models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)


def _configured(part: Part, asked: Sequence[float] = ()) -> Any:
    length = "length={}" if part.task == "perplexity" else "lengths=[{}]"
    asked_for = [f"eval.{part.task}.sparsities=[{','.join(map(str, asked))}]"] if asked else []
    return compose(
        "eval",
        [
            "eval.routers=[]",
            *part.overrides,
            f"eval.tasks=[{part.task}]",
            f"eval.{part.task}.{length.format(part.length)}",
            *asked_for,
            f"select={part.policy}",
        ],
    )


@torch.inference_mode()
def asked_sparsity(
    selection: ComparedSelection, loaded: Any, texts: Sequence[Tensor], share: float
) -> float:
    """Returns the sparsity to ask for so that the selection reads this share of the keys of
    ``texts``.
    """
    low, high, asked = 0.0, SPARSITIES[-1], 1 - share
    for _ in range(MOST_TRIES):
        with selection.attach(loaded.model, replace(selection.select, sparsity=asked)) as sparse:
            for ids in texts:
                prefill(loaded, ids)
            read = 1 - sparse.stats()["sparsity"]
        if abs(read - share) <= CLOSE * share:
            break
        low, high = (asked, high) if read > share else (low, asked)
        nearer = asked + read - share
        asked = round(nearer if low < nearer < high else (low + high) / 2, 4)
    return asked


def _asked(part: Part, job: Job) -> dict[float, float]:
    """Returns the sparsities to ask for, by share: measured on the chunks of perplexity, unless
    another part or a killed run has.
    """
    path = _asked_path(part)
    with locked_in_turn(path):
        if not path.exists():
            chunks = heldout_chunks(
                job.cfg, job.loaded.tokenizer, part.length, job.cfg.eval.perplexity.num_chunks
            )
            texts = [chunks[i]["input_ids"] for i in range(len(chunks))]
            (selection,) = job.compared.block_selections
            pairs = [
                [share, asked_sparsity(selection, job.loaded, texts, share)]
                for share in part.shares
            ]
            with replace_file(path) as file:
                file.write_text(json.dumps(pairs), encoding="utf-8")
    return read_asked(part)


def _asked_path(part: Part) -> Path:
    return part.out.parent / f"asked-{_method_name(part)}-{part.length}.json"


def read_asked(part: Part) -> dict[float, float]:
    """Returns the sparsities that a part asks for, by share of the keys."""
    return dict(json.loads(_asked_path(part).read_text(encoding="utf-8")))


def _method_name(part: Part) -> str:
    return "-".join([str(part.scores), *([] if part.gate is None else [run_of(part.gate)])])


def run_of(gate: Path) -> str:
    """Returns the name of the run that trained a gate."""
    return gate.resolve().parent.name


def measure(part: Part) -> list[EvalRow]:
    """Returns the rows of a part, including those kept from a killed run; runs in its own
    process.
    """
    loaded, cfg = _loaded(part.overrides), _configured(part)
    methods = calibrate_selections(Compared(methods_of(part, cfg, loaded), []), cfg, loaded)
    kept = PartialRows(part.out, settings_of(cfg, loaded, methods), resume=True)
    job = Job(loaded, cfg, methods, Progress(), kept, prepare(cfg, loaded))
    asked = _asked(part, job) if part.shares and part.scores else {}
    if kept.get("done") is None:
        for row in part.dense:
            key = row.task, row.extra["length"], row.method, row.setting
            if kept.get(*key) is None:
                kept.add([row], *key)
        if asked:
            job = replace(job, cfg=_configured(part, [*asked.values()]))
        with job.progress:
            task_rows = task_module(part.task).run(job)
        # such a part keeps no row of dense attention
        if part.task == "perplexity" and not methods.block_selections:
            kept.add(task_rows, part.task, part.length, DENSE, "")
        kept.add([], "done")
    rows = [row for row in kept.of_other_tasks(()) if row.method.is_dense == (part.scores is None)]
    if asked:
        shares = {sparsity: share for share, sparsity in asked.items()}
        rows = [
            replace(row, setting=Setting("keys", shares[row.setting.value or 0.0])) for row in rows
        ]
    if part.gate is None or not part.seeds:
        return rows
    seed = artifacts.read(part.gate, kind="gate").manifest["seed"]
    return [replace(row, extra={"seed": seed} | row.extra) for row in rows]


def methods_of(part: Part, cfg: Any, loaded: Any) -> list[ComparedSelection]:
    """Returns the block selection of a part; none for dense attention."""
    if part.scores is None:
        return []
    select = replace(cfg.select, scores=part.scores)
    if part.gate is None:
        return [ComparedSelection(untrained_scorer(part.scores).method, select)]
    gate = Gate.load(part.gate)
    assert gate.artifact is not None
    artifacts.check_model(gate.artifact.manifest, loaded.fingerprint, strict=True)
    method = GATE_SCORERS[part.scores].method
    method = method if part.seeds else method.of(source=run_of(part.gate))
    return [ComparedSelection(method, select, gate.to(loaded.model.device))]


def parts_of(
    folder: Path,
    lengths: Sequence[int],
    gates: Sequence[Path],
    baselines: Sequence[str],
    overrides: Sequence[str],
    policies: Sequence[str] = POLICIES,
    tasks: Sequence[str] = TASKS,
    gate_scores: Sequence[str] = tuple(GATE_SCORES),
    **fields: Any,
) -> tuple[list[Part], list[Part]]:
    """Returns the parts of dense attention and the parts of the methods.

    Raises UserError for a gate with blocks of another size than those of ``select``.
    """
    cfg: Any = compose("eval", overrides)
    # baselines have blocks of this size, too
    select = replace(cfg.select, **cfg.select.sizes.arguments) if baselines else cfg.select
    for gate in map(Gate.load, gates):
        select.check_gate(gate.cfg.sizes)
    asked = tuple(task for task in tasks if task != "leval" or cfg.eval.leval.path is not None)

    def part(name: str, task: str, length: int, **fields: Any) -> Part:
        name = f"{name}-{task}-{length}"
        return Part(name, folder / name, tuple(overrides), length, task, **fields)

    dense = [part("dense", *problem) for problem in product(asked, lengths)]
    methods: list[tuple[str, str, Path | None]] = [
        (f"{scores}-{run_of(path)}", scores, path) for path in gates for scores in gate_scores
    ]
    methods += [(name, name, None) for name in baselines]
    return dense, [
        part(f"{policy}-{name}", *problem, policy=policy, scores=scores, gate=gate, **fields)
        for policy in policies
        for name, scores, gate in methods
        for problem in product(asked, lengths)
    ]


def with_differences(rows: Sequence[tuple[str, EvalRow]]) -> Iterator[tuple[str, EvalRow]]:
    """Yields rows with their policies; rows of gates have the paired difference to the best row
    without training.
    """
    for policy, row in rows:
        quality = task_of(row.task).quality
        peers = [
            other
            for other_policy, other in rows
            if (other_policy, other.task, other.setting) == (policy, row.task, row.setting)
            and other.extra["length"] == row.extra["length"]
            and other.method.servable
            and not (other.method.trained or other.method.is_dense)
        ]
        if not row.method.trained or not peers or quality is None:
            yield policy, row
            continue
        best = max(peers, key=lambda peer: quality.better * quality.value(peer))
        difference, bounds = quality.difference(row, best)
        comparison = {
            "best_untrained": str(best.method),
            "over_best": difference,
            "over_best_interval": bounds,
        }
        yield policy, replace(row, extra=row.extra | comparison)


def write_rows(out: Path, run: str, model: str, rows: Sequence[tuple[str, EvalRow]]) -> None:
    """Writes the table of a run, and the table of all runs in ``out``."""
    lines = [
        {"model": model, "select": policy} | flat([row])[0]
        for policy, row in with_differences(rows)
    ]
    write_table(out / f"{run}.csv", lines)
    tables = sorted(path for path in out.glob("*.csv") if path.stem != "comparison")
    written: list[dict[str, Any]] = []
    for path in tables:
        with path.open(newline="", encoding="utf-8") as file:
            written += csv.DictReader(file)
    write_table(out / "comparison.csv", written)


def write_settings(path: Path, parts: Iterable[Part]) -> None:
    """Writes the sparsities that parts ask for, by method (``scores:run`` of gates) and share of
    the keys.
    """
    settings = {
        str(part.scores) if part.gate is None else f"{part.scores}:{run_of(part.gate)}": read_asked(
            part
        )
        for part in parts
    }
    path.write_text(json.dumps(settings), encoding="utf-8")


def measured(
    pool: ProcessPoolExecutor, dense: Sequence[Part], sparse: Sequence[Part]
) -> Iterator[tuple[Part, list[EvalRow]]]:
    """Yields the rows of all parts; a method is measured after dense attention at the same task and
    length.
    """
    waiting = {pool.submit(measure, part): part for part in dense}
    while waiting:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            part, rows = waiting.pop(future), future.result()
            yield part, rows
            if part.scores is None:
                waiting |= {
                    pool.submit(measure, replace(sparse_part, dense=tuple(rows))): sparse_part
                    for sparse_part in sparse
                    if (sparse_part.task, sparse_part.length) == (part.task, part.length)
                }


def _gpus() -> list[str | None]:
    """Returns the names of the visible GPUs, if there are several."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count < 2:
        return [None]
    return [*named.split(",")] if named else [*map(str, range(count))]


def _start(folder: Path, gpus: Any) -> None:
    """Gives a process the next GPU, if there are several, and redirects its output, such as
    progress, to a file.
    """
    gpu = gpus.get()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before this process uses CUDA
    log = (folder / f"process-{os.getpid()}.log").open("w", buffering=1, encoding="utf-8")
    sys.stdout = sys.stderr = log


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = ArgumentParser(description="Compare block selections on one model.")
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn eval")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        required=True,
        help="lengths of chunks and prompts, in tokens",
    )
    parser.add_argument("--gates", nargs="*", type=Path, default=[], help="artifacts of gates")
    parser.add_argument(
        "--scores",
        nargs="+",
        choices=GATE_SCORES,
        default=[*GATE_SCORES],
        help="scores by the gates",
    )
    parser.add_argument(
        "--seeds", action="store_true", help="the gates differ only in their training seed"
    )
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=[*BASELINES])
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=[*POLICIES])
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=TASKS,
        default=[*TASKS],
        help="leval only with eval.leval.path",
    )
    parser.add_argument(
        "--shares",
        nargs="*",
        type=float,
        default=[],
        help="shares of the keys to read, instead of sparsities",
    )
    parser.add_argument(
        "--processes", type=int, default=7, help="number of processes; they take the GPUs in turn"
    )
    args = parser.parse_intermixed_args(arguments)
    cfg: Any = compose("eval", args.overrides)
    run = "-".join([cfg.model.name, *map(str, args.lengths)])
    folder = args.out / run
    folder.mkdir(parents=True, exist_ok=True)
    policies = POLICIES[:1] if args.shares else args.policies
    fields = {"gate_scores": args.scores, "seeds": args.seeds, "shares": tuple(args.shares)}
    dense, sparse = parts_of(
        folder,
        args.lengths,
        args.gates,
        args.baselines,
        # thresholds are calibrated at this length
        [f"data.seq_len={max(args.lengths)}", *args.overrides],
        policies,
        args.tasks,
        **fields,
    )
    by_part: dict[Part, list[EvalRow]] = {}
    spawn = multiprocessing.get_context("spawn")
    gpus = spawn.Queue()
    for gpu in islice(cycle(_gpus()), args.processes):
        gpus.put(gpu)
    with ProcessPoolExecutor(
        args.processes, spawn, initializer=_start, initargs=(folder, gpus)
    ) as pool:
        for part, part_rows in measured(pool, dense, sparse):
            by_part[part] = part_rows
            print(f"{part.name}: {len(part_rows)} rows", flush=True)
    rows = [
        ("" if row.method.is_dense else part.policy, row)
        for part in (*dense, *sparse)
        for row in by_part[part]
    ]
    write_rows(args.out, run, cfg.model.name, rows)
    if args.shares:
        for length in args.lengths:
            chosen = (part for part in sparse if part.length == length)
            write_settings(args.out / f"{run}-asked-{length}.json", chosen)
    print(args.out / "comparison.csv")


if __name__ == "__main__":
    run_program(main)
