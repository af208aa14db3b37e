"""Trains a teacher.

    python -m msattn.trainer.recipes.teachers.train --plan embedded --text BOOKS --out FOLDER

A teacher is trained on text and retrieval tasks in stages of growing length. Each stage is one call of
:func:`msattn.trainer.training.loop.fit` that continues the previous one. After an interruption ``--resume`` continues to the
same model. The model is written to ``FOLDER/model``, metrics to ``FOLDER/metrics.jsonl`` and ``FOLDER/model/training.json``.
Several GPUs share the batches under ``torchrun --nproc-per-node N -m msattn.trainer.recipes.teachers.train ...``.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from msattn.trainer import artifacts
from msattn.trainer.config import TrackerConfig, TrainConfig
from msattn.trainer.config.values import one_of
from msattn.trainer.data.chunking import encode
from msattn.trainer.data.sources import local_documents
from msattn.trainer.data.tasks.sequences import TaskSequences
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import Fault, UserError, run_program
from msattn.trainer.models.devices import resolve_device
from msattn.trainer.models.tap import use_dense_attention
from msattn.trainer.recipes import argument_parser
from msattn.trainer.recipes.teachers.figures import bfloat16_autocast, evaluate, held_out_metrics, needle_prompts
from msattn.trainer.recipes.teachers.plans import PLANS, Plan
from msattn.trainer.recipes.teachers.text import StageDataset, Texts, check_lengths, check_unseen, load_tokenizer, read_sources
from msattn.trainer.signals import raised
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_folder
from msattn.trainer.training.distributed import fail_together, init_process_state
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

RECORD = "training.json"  # origin of the model; a folder without this file was not written here and is never replaced
OPTIONS = {  # keys of the configuration in messages of shared code: options of this program
    "resume=true": "--resume",
    "resume=false": "no --resume",
    "name= or outputs=": "--out",
    "another name=": "another --out",
    "outputs=": "--out=",
    "device=": "--device=",
}
DEV_PROMPTS = 32


class WeightedLanguageModel(nn.Module):
    """Next-token loss with token weights, as one graph for ``torch.compile``."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, weights: Tensor) -> dict[str, Any]:
        """Returns the weighted mean loss (nats) of tokens 1 to T of ``input_ids [B, T + 1]``.

        ``parts`` holds the unweighted means over text tokens and over answer tokens.
        """
        ids = input_ids.long()
        with bfloat16_autocast(ids.device):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        parts = {"text": _mean(losses, weights == 1.0), "answers": _mean(losses, weights > 1.0)}
        return {"loss": (losses * weights).sum() / weights.sum(), "parts": {k: v.detach() for k, v in parts.items()}}


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns the untrained model with weights drawn from ``plan.seed``."""
    config = LlamaConfig(
        **plan.architecture,
        vocab_size=len(tokenizer),
        max_position_embeddings=max(stage.seq_len for stage in plan.stages),
        tie_word_embeddings=True,
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
    )
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config)
    use_dense_attention(model)
    return model


def train(
    plan: Plan,
    texts: Texts,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    device: torch.device,
    workers: int = 0,
    compiled: bool = False,
    resume: bool = False,
) -> tuple[LlamaForCausalLM, float]:
    """Runs the stages of ``plan`` and returns the model and the seconds of all steps, also of those before a resumption."""
    model = build_model(plan, tokenizer).to(device)  # pyrefly: ignore[bad-argument-type]
    module = WeightedLanguageModel(model)
    ranks = PartialState().num_processes
    tasks, seconds = TaskSequences(tokenizer, texts.crop), 0.0
    with Tracker(TrackerConfig("none"), folder=out, run_name=plan.name, config=asdict(plan)) as tracker:
        for number, stage in enumerate(plan.stages):
            _print(f"stage {number + 1}: {stage}")
            prompts = needle_prompts(texts.dev, stage.seq_len, tokenizer, samples=DEV_PROMPTS, seed=1)
            data = StageDataset(texts, tasks, stage, seed=(plan.seed, number), bos=cast(int, tokenizer.bos_token_id))
            settings = TrainConfig(
                lr=plan.lr,
                steps=stage.steps,
                batch_size=stage.batch_size,
                micro_batch_size=stage.micro_batch_size(ranks),
                schedule=stage.schedule,
                warmup_steps=min(stage.warmup_steps, stage.steps),
                weight_decay=plan.weight_decay,
                beta2=plan.beta2,
                log_every=plan.log_every,
                eval_every=plan.eval_every,
                save_every=plan.eval_every,
                num_workers=workers,
                compile=compiled,
            )
            result = fit(
                module,
                data,
                train=settings,
                folder=out / f"stage-{number + 1}",
                tracker=tracker,
                device=device,
                seed=plan.seed,
                resume=resume,
                evaluate=partial(evaluate, model, texts.dev, stage.seq_len, tokenizer, prompts),
            )
            seconds += result.seconds
            tracker.offset += stage.steps
    return model, seconds


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], folder: Path) -> None:
    with replace_folder(folder) as new:
        model.half().save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; errors are those of :func:`run`, with this program's options in their messages."""
    parser = argument_parser("teachers.train", "Train a teacher.")
    parser.add_argument("--plan", choices=PLANS, default="embedded", help="the model and its training")
    parser.add_argument("--text", nargs="+", required=True, help="files or folders of books to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, metrics and the model")
    parser.add_argument("--test", help="folder of held-out texts for the final bits per byte")
    parser.add_argument("--haystack", help="folder of held-out texts for the final needle accuracy")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, instead of that of the embedded model")
    parser.add_argument("--steps", nargs="+", type=int, help="optimizer steps of each stage, instead of the plan's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--workers", type=int, default=14, help="data loader processes")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint")
    args = parser.parse_args(arguments)

    plan = replace(PLANS[args.plan], seed=args.seed)
    if args.steps is not None:
        if len(args.steps) != len(plan.stages):
            parser.error(f"--steps: give {len(plan.stages)} numbers, one per stage")
        plan = replace(plan, stages=tuple(replace(s, steps=n) for s, n in zip(plan.stages, args.steps, strict=True)))
    with _options_in_messages(), fail_together(), raised():
        run(args, plan)


@contextmanager
def _options_in_messages() -> Iterator[None]:
    """Replaces keys of the configuration in the messages of errors by :data:`OPTIONS`."""
    try:
        yield
    except (UserError, Fault, KeyboardInterrupt) as error:
        for key, option in OPTIONS.items():
            error.args = tuple(str(part).replace(key, option) for part in error.args)
        raise


def run(args: argparse.Namespace, plan: Plan) -> None:
    """Trains the model of ``plan`` with the options ``args`` of the command line, and writes it with its figures."""
    one_of("device", args.device, ("auto", "cpu", "cuda"))
    device, folder = resolve_device(args.device), args.out / "model"
    artifacts.check_writable(folder, overwrite=True, marker=RECORD)
    tokenizer = load_tokenizer(args.tokenizer or EMBEDDED_MODEL)
    texts, heldout = read_texts(args, plan, tokenizer)
    processes = init_process_state(device)
    counts = {name: len(tokens) for name, tokens in texts.tokens.items()}
    _print(f"tokens of text: {counts}, held out: {len(texts.dev)}")

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forked data workers would wait for threads that they lack
    compiled = device.type == "cuda" and not args.no_compile
    options = {"device": device, "workers": args.workers, "compiled": compiled, "resume": args.resume}
    with locked(folder):
        model, seconds = train(plan, texts, tokenizer, args.out, **options)
        if not processes.is_main_process:
            return
        for weight in model.parameters():  # figures are those of the weights in the file; frequencies of RoPE stay exact
            weight.data = weight.half().float()
        record = {
            "plan": asdict(plan),
            "tokenizer": str(args.tokenizer or "embedded"),
            "parameters": model.num_parameters(),
            "tokens": plan.tokens,
            "minutes": round(seconds / 60, 1),
            "processes": processes.num_processes,
            "versions": artifacts.versions(),
            "figures": held_out_metrics(model, tokenizer, plan.stages[-1].seq_len, heldout),
        }
        save(model, tokenizer, record, folder)
    _print(json.dumps(record["figures"], indent=2))


def read_texts(args: argparse.Namespace, plan: Plan, tokenizer: PreTrainedTokenizerFast) -> tuple[Texts, dict[str, np.ndarray]]:
    """Returns the tokens of the training text, and those of ``--test`` and ``--haystack`` by option."""
    sources = read_sources(args.text)
    paths = {"--test": args.test, "--haystack": args.haystack}
    heldout = {option: path for option, path in paths.items() if path is not None}
    check_unseen(sources, heldout)
    tokens = {option: encode(local_documents(option, path), tokenizer) for option, path in heldout.items()}
    texts = Texts(sources, tokenizer)
    check_lengths(tokens | texts.by_name(), plan)
    texts.warn_of_repeats(plan)
    return texts, tokens


def _print(line: str) -> None:
    if PartialState().is_main_process:
        print(line, flush=True)


if __name__ == "__main__":
    run_program(main)
