"""NVIDIA's kvpress (https://github.com/NVIDIA/kvpress) on the prompts of ``eval=ruler``, in the
columns of its results: docs/figures/kvpress.csv, the table ``kvpress`` of docs/measurements.md.

kvpress 0.5 needs transformers below 5.3, older than msattn's, so this program runs in three steps.
The second runs as a plain file in its own environment (``pip install kvpress``), without msattn::

    python docs/experiments/kvpress_ruler.py prompts prompts.jsonl OVERRIDES
    KVPRESS/bin/python docs/experiments/kvpress_ruler.py answers MODEL prompts.jsonl \\
        answers.jsonl --shares 0.05 0.1 0.2
    python docs/experiments/kvpress_ruler.py rows prompts.jsonl kvpress.csv answers.jsonl

OVERRIDES are those of ``msattn eval eval=ruler``. A press removes keys from the cache after a dense
prefill of the prompt, including the question but not its last token; decoding starts with that
token. msattn's routings read RULER in the same way, but choose keys for each token. The share of
the keys that is kept is counted in the cache. ``--part 0/7`` answers the first of seven parts of
the prompts, for parallel processes with a file each; ``rows`` takes all files. Answers that are
already in a file are not generated again. Presses that need weights or statistics of a model
(DuoAttention, QFilter, FastKVzip and others) are left out.
"""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

# (module kvpress, share of the keys to remove) -> press
PRESSES: dict[str, Callable[[Any, float], Any]] = {
    "dense": lambda kvpress, removed: None,
    "StreamingLLM": lambda kvpress, removed: kvpress.StreamingLLMPress(removed),
    "TOVA": lambda kvpress, removed: kvpress.TOVAPress(removed),
    "KeyDiff": lambda kvpress, removed: kvpress.KeyDiffPress(removed),
    "SnapKV": lambda kvpress, removed: kvpress.SnapKVPress(removed),
    "PyramidKV": lambda kvpress, removed: kvpress.PyramidKVPress(removed),
    "ExpectedAttention": lambda kvpress, removed: kvpress.ExpectedAttentionPress(removed),
    "Ada-SnapKV": lambda kvpress, removed: kvpress.AdaKVPress(kvpress.SnapKVPress(removed)),
    "Ada-ExpectedAttention": lambda kvpress, removed: kvpress.AdaKVPress(
        kvpress.ExpectedAttentionPress(removed)
    ),
    "KVzip": lambda kvpress, removed: kvpress.KVzipPress(removed),
}


def write_prompts(path: Path, overrides: Sequence[str]) -> None:
    """Writes the prompts that ``msattn eval eval=ruler`` would answer with ``overrides``, a JSON
    object in each line.
    """
    from msattn.trainer import models
    from msattn.trainer.commands.compose import compose
    from msattn.trainer.data.tasks.ruler import TASKS
    from msattn.trainer.evaluate.tasks import ruler
    from msattn.trainer.storage.replace import replace_file

    cfg: Any = compose("eval", ["eval=ruler", *overrides])
    loaded = models.load(cfg.model, device="cpu", dtype=cfg.dtype, seed=cfg.seed)
    hay, lines = ruler.read_haystack(cfg), []
    for length in cfg.eval.ruler.lengths:
        for task, drawn in ruler.make_samples(cfg, loaded.tokenizer, hay, length).items():
            for sample in drawn:
                ids = ruler.encode(loaded.tokenizer, sample, cfg.chat)[0].tolist()
                of_task = {"task": task, "length": length, "new_tokens": TASKS[task].new_tokens}
                lines.append(json.dumps({**of_task, "ids": ids, "sample": vars(sample)}) + "\n")
    with replace_file(path) as new:
        new.write_text("".join(lines), encoding="utf-8")


def write_answers(args: Namespace) -> None:
    """Appends each press's answer to each prompt at each share, as JSON lines; needs only kvpress
    and transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    kvpress = import_module("kvpress")  # no dependency of msattn
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        .to(args.device)
        .eval()
    )
    args.answers.touch()
    prompts, done = _lines(args.prompts), {_key(line) for line in _lines(args.answers)}
    part, parts = map(int, args.part.split("/"))
    with args.answers.open("a", encoding="utf-8") as file:
        tried = [
            (press, share)
            for press in args.presses
            for share in ([1.0] if press == "dense" else args.shares)
        ]
        for press, share in tried:
            for number, prompt in enumerate(prompts):
                answer = {"press": press, "share": share, "prompt": number}
                if number % parts == part and _key(answer) not in done:
                    with torch.inference_mode():
                        answer |= _answered(
                            model, tokenizer, PRESSES[press](kvpress, 1 - share), prompt
                        )
                    file.write(json.dumps(answer) + "\n")
                    file.flush()


def _answered(model: Any, tokenizer: Any, press: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """Returns text and tokens of the greedy answer, the share of the keys that were kept, and
    seconds.
    """
    from contextlib import nullcontext

    import torch
    from transformers import DynamicCache

    ids = torch.tensor([prompt["ids"]], device=model.device)
    cache = DynamicCache()
    begin = time.perf_counter()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=ids[:, :-1], past_key_values=cache)
    kept, token, new = _kept_share(model, cache, ids.shape[1] - 1), ids[:, -1:], []
    ends = model.generation_config.eos_token_id
    while len(new) < prompt["new_tokens"]:
        positions = torch.tensor([[ids.shape[1] - 1 + len(new)]], device=model.device)
        logits = model(input_ids=token, past_key_values=cache, position_ids=positions).logits
        token = logits[:, -1:].argmax(-1)
        new.append(token.item())
        text = tokenizer.decode(new, skip_special_tokens=True)
        if new[-1] in (ends if isinstance(ends, list) else [ends]) or _is_complete(
            prompt["sample"], text
        ):
            break
    return {"text": text, "tokens": new, "kept": kept, "seconds": time.perf_counter() - begin}


def _kept_share(model: Any, cache: Any, tokens: int) -> float:
    """Returns the share of the keys that is left in the cache; some presses leave keys there and
    mask them.
    """
    left = every = 0
    for layer, block in zip(cache.layers, model.model.layers, strict=True):
        heads, keys = layer.keys.shape[1:3]
        masked = getattr(block.self_attn, "masked_key_indices", None)
        left += heads * keys - (0 if masked is None else len(masked[0]))
        every += heads * tokens
    return left / every


def _is_complete(sample: dict[str, Any], text: str) -> bool:
    """Returns True if further tokens cannot change RULER's score."""
    contained = [answer.lower() in text.lower() for answer in sample["answers"]]
    return any(contained) if sample["one_suffices"] else all(contained)


def write_rows(prompts: Path, table: Path, answers: Sequence[Path]) -> None:
    """Writes the rows of all presses in the format of ``results.csv`` of ``eval=ruler``; dense
    attention must be among them.
    """
    from msattn.trainer.evaluate.row import flat
    from msattn.trainer.storage.replace import write_table

    write_table(
        table,
        flat(
            list(press_rows(_lines(prompts), [line for path in answers for line in _lines(path)]))
        ),
    )


def press_rows(prompts: list[dict[str, Any]], answers: list[dict[str, Any]]) -> "Iterator[Any]":
    """Yields an ``EvalRow`` for each length, press and share; raises UserError if answers are
    missing.
    """
    from contextlib import nullcontext
    from statistics import fmean

    from msattn.trainer.data.tasks.ruler import Sample
    from msattn.trainer.errors import UserError
    from msattn.trainer.evaluate.compared import MethodSetting
    from msattn.trainer.evaluate.row import Setting
    from msattn.trainer.evaluate.tasks import ruler
    from msattn.trainer.evaluate.tasks.answers import Answers
    from msattn.trainer.methods.base import DENSE, Method

    by_key = {_key(answer): answer for answer in answers}
    tried = sorted(
        {(answer["press"], answer["share"]) for answer in answers},
        key=lambda pair: pair[0] != "dense",
    )
    for length in dict.fromkeys(prompt["length"] for prompt in prompts):
        dense = None
        numbers = [number for number, prompt in enumerate(prompts) if prompt["length"] == length]
        samples: dict[str, list[Sample]] = {}
        for number in numbers:
            samples.setdefault(prompts[number]["task"], []).append(
                Sample(**prompts[number]["sample"])
            )
        for press, share in tried:
            given = [by_key.get((press, share, number)) for number in numbers]
            if missing := given.count(None):
                raise UserError(
                    f"{press} at {share:g} of the keys: {missing} of {len(given)} answers are "
                    f"missing"
                )
            own = [answer for answer in given if answer is not None]
            spent = {
                "selectivity": fmean(answer["kept"] for answer in own),
                "latency_s": fmean(answer["seconds"] for answer in own),
            }
            method = DENSE if press == "dense" else Method(f"kvpress {press}")
            case = MethodSetting(
                method, Setting() if method.is_dense else Setting("keys", share), nullcontext
            )
            texts = Answers(
                [answer["tokens"] for answer in own], [answer["text"] for answer in own], spent
            )
            row = ruler.as_row(case, samples, texts, length, dense)
            dense = row if method.is_dense else dense
            yield row


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects in the complete lines of a file."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _key(answer: dict[str, Any]) -> tuple[Any, ...]:
    return answer["press"], answer["share"], answer["prompt"]


def main() -> None:
    """Runs one step from the command line."""
    parser = ArgumentParser(prog="kvpress_ruler", description="Measure kvpress on RULER's prompts.")
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("prompts", help="write the prompts; needs msattn")
    step.add_argument("prompts", type=Path)
    step.add_argument("overrides", nargs="*", help="Hydra overrides of msattn eval eval=ruler")
    step = steps.add_parser("answers", help="answer the prompts; needs kvpress")
    step.add_argument("model", help="folder of the model")
    step.add_argument("prompts", type=Path)
    step.add_argument("answers", type=Path)
    step.add_argument("--presses", nargs="+", choices=PRESSES, default=[*PRESSES])
    step.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[0.05, 0.1, 0.2],
        help="shares of the keys to keep",
    )
    step.add_argument("--part", default="0/1", help="part of the prompts, as INDEX/PARTS")
    step.add_argument("--device", default="cuda")
    step.add_argument("--dtype", default="bfloat16")
    step = steps.add_parser("rows", help="write the table; needs msattn")
    step.add_argument("prompts", type=Path)
    step.add_argument("table", type=Path)
    step.add_argument("answers", type=Path, nargs="+")
    args = parser.parse_args()
    if args.step == "answers":
        write_answers(args)
        return
    from msattn.trainer.errors import run_program

    steps_of = {
        "prompts": lambda: write_prompts(args.prompts, args.overrides),
        "rows": lambda: write_rows(args.prompts, args.table, args.answers),
    }
    run_program(steps_of[args.step])


if __name__ == "__main__":
    main()
