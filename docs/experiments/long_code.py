"""Measures the table ``long-code``: the next tokens of a source file after its repository.

    python docs/experiments/long_code.py OUT REPOSITORIES OVERRIDES \\
        --gates outputs/qwen/*/gate --settings settings.json

REPOSITORIES is a folder of ``code-<name>.txt.xz``, each with the files of a repository, separated
by header lines ``# ===== owner/name: path =====``. OVERRIDES are those of ``msattn eval``: the
model, and the text that thresholds are calibrated on. A prompt is raw text without a chat template:
other files of a repository, those that share most folders with the target file last, then the first
half of the target file. It loses tokens at its start and has exactly ``--lengths`` tokens. All
lengths and methods continue the same files. Measured are

- the likelihood of the next 64 tokens of the file, after a prefill with each method, and its ratio
  to dense attention;
- ``lines``: the share of the complete, not blank lines in these 64 tokens that a greedy
  continuation of 64 tokens has exactly at the same place;
- both with dense attention to only the last 2,048 and 8,192 tokens, which shows what the long
  context is worth. Their ``selectivity`` is the share of the prompt that they read.

The JSON file of ``--settings`` has the sparsity to ask for, by method and share of the keys to
read, for example ``{"quest": {"0.2": 0.83, "0.1": 0.92}, "gate:run": {"0.2": 0.79, "0.1": 0.9}}``;
``run`` is the folder of a gate.

Measurements are kept in OUT, and the same command continues after an interruption. ``--part 0 4``
to ``--part 3 4`` measure a quarter of the methods each, in processes that may run at the same time.
Without it, the rest is measured and ``OUT/long_code.csv`` is written, with paired 95 % intervals.
"""

import hashlib
import json
import lzma
import random
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from os.path import commonpath
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from comparison import POLICIES, Part, methods_of, parts_of, run_of, with_differences

from msattn.trainer import artifacts, models
from msattn.trainer.commands.compose import compose
from msattn.trainer.config.select import BASELINES
from msattn.trainer.data.benchmarks import LevalQuestion
from msattn.trainer.data.chunking import encode_texts
from msattn.trainer.errors import UserError, run_program
from msattn.trainer.evaluate.calibration import calibrate_selections
from msattn.trainer.evaluate.compared import Compared, MethodSetting
from msattn.trainer.evaluate.intervals import mean_interval, paired_means
from msattn.trainer.evaluate.job import Job, Measurement, PartialRows, settings_of
from msattn.trainer.evaluate.row import EvalRow, Setting, flat
from msattn.trainer.evaluate.tasks.answers import Question, answer
from msattn.trainer.evaluate.tasks.leval import Asked, as_row, paired_likelihoods, prefilled
from msattn.trainer.methods.base import DENSE
from msattn.trainer.models.chat import around_prompt
from msattn.trainer.progress import Progress
from msattn.trainer.storage.replace import write_table

HEADER = re.compile(r"(?m)^(?=# ===== [\w.-]+/[\w.-]+: .* =====$)")
# the beginning of a line; tokenizers join the newlines around blank ones
LINE = re.compile(r"(?m)^(?=.*\S)")
SOURCE = (".py", ".go", ".rs", ".ts", ".c", ".h", ".js")
DOCUMENTS = ("doc/", "docs/")  # their sources, such as conf.py, are no targets
# characters of a target file, so that most of a long prompt is other files
SHORTEST, LONGEST = 4_000, 20_000
NEW_TOKENS = 64
WINDOWS = (2048, 8192)
COLUMNS = (  # `score` is the likelihood of a token
    *(
        "model",
        "select",
        "method",
        "run",
        "seed",
        "length",
        "setting",
        "asked_sparsity",
        "selectivity",
        "samples",
    ),
    *("score", "interval_low", "interval_high", "ratio_to_dense", "ratio_low", "ratio_high"),
    *(
        "lines",
        "lines_low",
        "lines_high",
        "lines_over_dense",
        "lines_over_dense_low",
        "lines_over_dense_high",
    ),
    *(
        "best_untrained",
        "over_best",
        "over_best_low",
        "over_best_high",
        "latency_s",
        "peak_memory_mb",
    ),
)


def read_files(path: Path) -> dict[str, str]:
    """Returns the files of a repository by their paths, each with its header line."""
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        parts = HEADER.split(file.read())[1:]
    return {part.partition(": ")[2].partition(" =====\n")[0]: part for part in parts}


def targets(folder: Path, names: Sequence[str], seed: int) -> Iterator[tuple[dict[str, str], str]]:
    """Yields repositories and files to continue, from each in turn; without ``names``, from all
    that are mostly source code.
    """
    paths = {
        path.name[len("code-") : -len(".txt.xz")]: path
        for path in sorted(folder.glob("code-*.txt.xz"))
    }
    if unknown := sorted(set(names) - set(paths)):
        raise UserError(f"--names {unknown[0]}: there is no code-{unknown[0]}.txt.xz in {folder}")
    by_repository = []
    for name in names or paths:
        files = read_files(paths[name])
        source = [path for path in files if path.endswith(SOURCE)]
        if names or 2 * sum(len(files[path]) for path in source) > sum(map(len, files.values())):
            fitting = [
                path
                for path in source
                if SHORTEST <= len(files[path]) <= LONGEST and not path.startswith(DOCUMENTS)
            ]
            random.Random(f"{seed} {name}").shuffle(fitting)
            by_repository.append([(files, path) for path in fitting])
    for row in zip_longest(*by_repository):
        yield from filter(None, row)


def encode_prompt(
    tokenizer: Any, files: Mapping[str, str], target: str, lengths: Sequence[int]
) -> list[Asked] | None:
    """Returns a prompt of each length, all with the same end; None if the repository or the rest of
    the file is too short.
    """

    def encode(text: str) -> list[int]:
        return list(encode_texts(tokenizer, [text])[0])

    def nearness(path: str) -> tuple[int, int, str]:
        return len(Path(commonpath([f"/{path}", f"/{target}"])).parts), -path.count("/"), path

    text = files[target]
    for cut in (match.start() for match in LINE.finditer(text, len(text) // 2)):
        gold = encode(text[cut:])[:NEW_TOKENS]
        expected = str(tokenizer.decode(gold, skip_special_tokens=True))
        if len(gold) == NEW_TOKENS and "\n" in expected:
            break
    else:
        return None
    opening, _ = around_prompt(tokenizer, chat=False)  # BOS, if the model has one
    tokens = encode(text[:cut])
    for path in sorted(files.keys() - {target}, key=nearness, reverse=True):
        if len(tokens) >= max(lengths):
            break
        tokens = encode(files[path]) + tokens
    if len(tokens) < max(lengths):
        return None
    # Prompts of L-Eval without an instruction: the whole prompt is the document.
    question, nothing = LevalQuestion("", "", expected, "lines"), torch.tensor([], dtype=torch.long)
    prompts = [torch.tensor([*opening, *tokens[len(opening) - length :]]) for length in lengths]
    return [
        Asked("code", question, prompt, nothing, torch.tensor(gold), nothing) for prompt in prompts
    ]


def matched_lines(expected: str, text: str) -> float:
    """Returns the share of the complete lines of ``expected``, blank ones apart, that ``text`` has
    at the same place.
    """
    pairs = zip_longest(expected.split("\n")[:-1], text.split("\n"))
    return fmean(line == answered for line, answered in pairs if line and line.strip())


def measure(
    part: Part,
    cfg: Any,
    loaded: Any,
    prompts: Mapping[int, list[Asked]],
    sparsities: Mapping[str, float],
) -> list[EvalRow]:
    """Returns the rows of a part, including those kept from an earlier run; they are not yet
    compared with dense attention.
    """
    methods = calibrate_selections(Compared(methods_of(part, cfg, loaded), []), cfg, loaded)
    digest = hashlib.sha256(
        repr(
            [[sample.document.tolist() for sample in samples] for samples in prompts.values()]
        ).encode()
    )
    kept = PartialRows(
        part.out, settings_of(cfg, loaded, methods) | {"prompts": digest.hexdigest()}, resume=True
    )
    extra: dict[str, Any] = {}
    if part.gate is not None:
        extra = {
            "run": run_of(part.gate),
            "seed": artifacts.read(part.gate, kind="gate").manifest["seed"],
        }

    def rows(
        case: MethodSetting,
        length: int,
        read: int,
        asked_sparsity: float | None,
        advance: Callable[[], None],
        _: Any,
    ) -> list[EvalRow]:
        asked = prompts[read]
        likelihoods, spent = prefilled(loaded, asked, case, advance)
        texts = answer(
            loaded, [Question(sample.document[None], NEW_TOKENS) for sample in asked], case, advance
        ).texts
        lines = [
            matched_lines(sample.question.gold, text)
            for sample, text in zip(asked, texts, strict=True)
        ]
        share = spent["selectivity"] * read / length
        row = as_row(
            case,
            asked,
            likelihoods,
            lines,
            spent | {"sparsity": 1 - share, "selectivity": share},
            length,
            None,
        )
        own = {
            "lines": fmean(lines),
            "lines_interval": mean_interval(lines),
            "asked_sparsity": asked_sparsity,
        }
        return [replace(row, extra=row.extra | own | extra)]

    plan, length = [], part.length
    whole = MethodSetting(DENSE, Setting(), nullcontext)
    windows = {
        window: whole._replace(setting=Setting(f"last {window} tokens"))
        for window in WINDOWS
        if window < length
    }
    dense = [(case, read, None) for read, case in ({length: whole} | windows).items()]
    sparse = [
        (case._replace(setting=Setting("keys", float(share))), length, sparsity)
        for selection in methods.block_selections
        for share, sparsity in sparsities.items()
        for case in selection.cases(loaded.model, [sparsity])
    ]
    for case, read, sparsity in sparse if part.scores else dense:
        key = length, case.method, case.setting, sparsity
        plan.append(
            Measurement(key, partial(rows, case, length, read, sparsity), 2 * len(prompts[read]))
        )
    job = Job(loaded, cfg, methods, Progress(), kept)
    with job.progress:
        return job.rows(f"long code, {part.name}", plan)


def over_dense(row: EvalRow, dense: EvalRow) -> EvalRow:
    """Returns the row with its paired differences to dense attention."""
    rise, bounds = paired_likelihoods(row, dense)
    more, lines_bounds = paired_means(row.extra["scores"], dense.extra["scores"])
    compared = {
        "ratio_interval": bounds and [1 + bound for bound in bounds],
        "lines_over_dense": more,
        "lines_over_dense_interval": lines_bounds,
    }
    return replace(row, ratio_to_dense=1 + rise, extra=row.extra | compared)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = ArgumentParser(
        "long_code.py",
        description="Measure the next tokens of source files after their repositories.",
    )
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("repositories", type=Path, help="folder of code-<name>.txt.xz")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn eval")
    parser.add_argument(
        "--names",
        nargs="*",
        default=[],
        help="repositories; default: all that are mostly source code",
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[32768], help="tokens of a prompt"
    )
    parser.add_argument("--prompts", type=int, default=100, help="number of files to continue")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of files")
    parser.add_argument("--gates", nargs="*", type=Path, default=[], help="artifacts of gates")
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=[])
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0])
    parser.add_argument("--settings", type=Path, help="JSON file of the sparsities of each method")
    parser.add_argument(
        "--sparsities",
        nargs="*",
        type=float,
        default=[0.8, 0.9],
        help="of methods that are not in --settings",
    )
    parser.add_argument(
        "--part",
        nargs=2,
        type=int,
        metavar=("NUMBER", "OF"),
        help="measure one part of the methods",
    )
    args = parser.parse_intermixed_args(arguments)
    number, of = args.part or (0, 1)
    if not 0 <= number < of:
        parser.error(f"--part {number} {of}: expected a number from 0 to {of - 1}")
    # The task itself is not run; L-Eval is the one that these prompts are like.
    overrides = [
        f"data.seq_len={max(args.lengths)}",
        "eval.tasks=[leval]",
        *args.overrides,
        f"select={args.policy}",
    ]
    cfg: Any = compose("eval", overrides)
    loaded: Any = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    # Qwen's own would penalize the words of the repository
    loaded.model.generation_config.repetition_penalty = None

    sizes = sorted({*args.lengths, *(window for window in WINDOWS if window < max(args.lengths))})
    encoded = (
        encode_prompt(loaded.tokenizer, *target, sizes)
        for target in targets(args.repositories, args.names, args.seed)
    )
    samples = [*islice(filter(None, encoded), args.prompts)]
    if len(samples) < args.prompts:
        raise UserError(
            f"--prompts {args.prompts}: the repositories have {len(samples)} files for "
            f"{max(args.lengths)} tokens"
        )
    prompts = dict(zip(sizes, map(list, zip(*samples, strict=True)), strict=True))

    dense, sparse = parts_of(
        args.out, args.lengths, args.gates, args.baselines, overrides, [args.policy],
        ["perplexity"], seeds=True,
    )  # fmt: skip
    parts = [*dense, *sparse]
    given = json.loads(args.settings.read_text(encoding="utf-8")) if args.settings else {}
    default = {f"{1 - sparsity:.6g}": sparsity for sparsity in args.sparsities}
    rows: list[tuple[str, EvalRow]] = []
    for part in parts[number::of]:
        name = f"{part.scores}:{run_of(part.gate)}" if part.gate else part.scores
        measured = measure(part, cfg, loaded, prompts, given.get(name, default))
        rows += [(args.policy if part.scores else "", row) for row in measured]
    if args.part:
        return
    by_length = {
        row.extra["length"]: row
        for _, row in rows
        if row.method.is_dense and row.setting == Setting()
    }
    compared = [(policy, over_dense(row, by_length[row.extra["length"]])) for policy, row in rows]
    lines = [
        {"model": cfg.model.name, "select": policy} | flat([row])[0]
        for policy, row in with_differences(compared)
    ]
    write_table(
        args.out / "long_code.csv", [{key: line.get(key) for key in COLUMNS} for line in lines]
    )
    print(args.out / "long_code.csv")


if __name__ == "__main__":
    run_program(main)
