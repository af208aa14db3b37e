"""The command line: start-up time, exit codes, one-line errors, sweeps and completion."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import yaml

from msattn import cli
from msattn.trainer.commands import compose, own
from msattn.trainer.commands.generate import generate
from msattn.trainer.commands.jobs import COMMANDS, Command
from msattn.trainer.errors import UserError
from msattn.trainer.models import break_even
from msattn.trainer.models.break_even import BREAK_EVEN, DECODING_COST
from tests.commands.conftest import Refused, Run

NAMES = (*COMMANDS, "demo", "push", "configure", "import-gate", "doctor", "help")
MSATTN = [sys.executable, "-c", "from msattn.cli import main; main()"]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> list:
    """Replaces all jobs; collects the configurations and arguments that they are called with."""
    called = []

    def run(self: Command, cfg: object, arguments: dict) -> str:
        called.append((cfg, arguments))
        return "done"

    monkeypatch.setattr(Command, "run", run)
    return called


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom msattn.cli import main\ntry: main(['--help'])\nexcept SystemExit as e: "
        "assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'triton', 'hydra', 'omegaconf', 'wandb', 'faiss', "
        "'numpy', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    seconds = []
    for _ in range(5):  # the fastest of five, in processor time: other processes share this machine
        start = _children_cpu_seconds()
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        seconds.append(_children_cpu_seconds() - start)
        assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in NAMES)
    assert min(seconds) < 0.3


def test_cfg_prints_yaml_and_runs_nothing(msattn: Run, here: Path, job: list) -> None:
    code, out, err = msattn("train-gate", "model=llama3", "train.steps=7", "--cfg", "job")
    reduced = (
        "seq_len=2048 instead of 65536, recent=128 instead of 2047, gate_batch=2 instead of 16"
    )
    assert (code, err) == (0, f"msattn: on a CPU, so model.presets has {reduced}\n")
    shown = yaml.safe_load(out)
    assert (shown["model"]["path"], shown["train"]["steps"]) == ("meta-llama/Llama-3.1-8B", 7)
    assert "hydra" not in shown
    assert "hydra" in yaml.safe_load(msattn("train-gate", "--cfg", "all")[1])
    assert not job
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("trian-gate", "trian-gate: no such command (did you mean train-gate?)"),
        ("gen", "gen: no such command (did you mean generate?)"),
        ("train-gate modle=llama3", "unknown key modle (did you mean model?)"),
        ("train-gate model=lama3", "model=lama3: expected gemma3_270m, llama3"),
        ("train-gate train.stepz=3", "unknown key train.stepz (did you mean train.steps?)"),
        ("train-gate +gate.hiden=3", "unknown key gate.hiden (did you mean gate.hidden?)"),
        ("train-gate train.steps=many", "train.steps='many': expected an integer"),
        ("train-gate train.steps=1,2", "a comma is a sweep: add --multirun"),
        ("train-gate data.path=it's", "not understood; write key=value"),
        ("train-gate data=text", "data=text needs a path"),
        ("train-gate --cgf job", "No such option: --cgf"),
        ("train-gate --config-dir nowhere", "--config-dir nowhere: no such folder"),
        ("eval select=topq", "did you mean topk?"),
        ("eval +select=quest", "+select: the key exists; leave out the plus sign"),
        ("eval ~select.sparsity=0.4", "The value of 'select.sparsity' is 0.5 and not 0.4."),
        ("eval select=null", "a group takes one of its options, as in select=topk"),
        ("-m train-gate", "No such option: -m"),
        ("train-gate -m train.steps=1,many", "job 1: train.steps='many': expected an integer"),
        (
            "fit-kmeans -m kmeans.num_buckets=glob(*)",
            "--multirun: kmeans.num_buckets=glob(*): no value",
        ),
        ("generate", "give one of --prompt and --prompt-file"),
        ("generate --chat -m seed=1,2", "--chat: only one chat runs at a time"),
        (
            "generate --prompt-file missing.txt",
            "--prompt-file missing.txt: No such file or directory",
        ),
        ("demo modle=tiny", "unknown key modle"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    refused: Refused, here: Path, job: list, arguments: str, says: str
) -> None:
    refused(says, *arguments.split(" "))
    if "-m" not in arguments:
        assert not job
        assert not list(here.iterdir()), "a mistake must leave no files"


def test_a_run_writes_its_configuration(msattn: Run, here: Path, job: list) -> None:
    code, _, err = msattn("train-gate", "train.steps=3", "outputs=out", "name=mine")
    assert (code, err) == (0, "")
    ((cfg, arguments),) = job
    assert (cfg.train.steps, cfg.name, arguments) == (3, "mine", {})
    (run,) = (here / "out/tiny/mine/runs").iterdir()
    assert run.name.startswith("train-gate-")
    assert yaml.safe_load((run / ".hydra/config.yaml").read_text())["train"]["steps"] == 3
    assert yaml.safe_load((run / ".hydra/overrides.yaml").read_text()) == [
        "train.steps=3",
        "outputs=out",
        "name=mine",
    ]


def test_config_dir_adds_options(msattn: Run, here: Path, job: list) -> None:
    folder = here / r"it's a\b ${oc.env:HOME}"
    (folder / "gate").mkdir(parents=True)
    (folder / "gate" / "wide.yaml").write_text("defaults: [default, _self_]\nhidden: 256\n")
    code, _, err = msattn("train-gate", "--config-dir", str(folder), "gate=wide")
    assert (code, err) == (0, "")
    assert job[0][0].gate.hidden == 256


def test_prompts_are_not_parsed_by_hydra(msattn: Run, here: Path, job: list) -> None:
    prompt = "What's = (this), ~ #1? \u00fc ${x}"
    assert msattn("generate", "--prompt", prompt)[0] == 0
    (here / "p.txt").write_text(prompt, encoding="utf-8")
    assert msattn("generate", "--prompt-file", "p.txt", "max_new_tokens=3")[0] == 0
    assert [arguments for _, arguments in job] == [{"prompt": prompt, "chat": False}] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("train.stepz=3", "unknown key train.stepz (did you mean train.steps?)"),
        ("gate=wied --config-dir groups", "gate=wied: expected decode, default, wide"),
        ("-m seed=1,2 gate.los=mse", "unknown key gate.los (did you mean gate.loss?)"),
    ],
)
def test_keys_are_checked_before_a_model_is_read(
    refused: Refused, here: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, says: str
) -> None:
    monkeypatch.setattr(own, "_positions", lambda model: pytest.fail("the model is read"))
    (here / "groups" / "gate").mkdir(parents=True)
    (here / "groups" / "gate" / "wide.yaml").write_text("hidden: 256\n")
    refused(says, "train-gate", "--model", "model.gguf", *arguments.split())


LINE = "def add(first, second):\n    return first + second\n"


@pytest.mark.parametrize(
    ("prompt", "overrides", "described", "note"),
    [
        (
            LINE,
            ["device=cpu"],
            "tiny: prompts dense, which is faster at every length at sparsity=0.5; new tokens "
            r"dense, which is faster below [\d,]+ keys\n",
            "Attention was dense where that is faster",
        ),
        (
            LINE,
            ["device=cpu", "select.sparsity=0.8", "artifacts.qmodel=null"],
            "tiny: prompts dense, which is faster below 4,096 tokens at sparsity=0.8; new tokens",
            "Attention was dense where that is faster",
        ),
        (
            LINE,
            ["select=quest", "dense_below=99"],
            "tiny: prompts dense, as dense_below=99; new tokens dense\n",
            "dense_below=0 makes it sparse everywhere",
        ),
        (
            LINE,
            ["select=quest", "dense_below=0", "select.dense_queries=64"],
            "tiny: prompts dense, as select.dense_queries=64; new tokens dense\n",
            "",
        ),
        (
            LINE,
            ["select=quest", "dense_below=0"],
            "tiny: prompts by quest, topk, sparsity=0.5; new tokens dense\n",
            "Sparse attention read every key: the prompt is too short",
        ),
        (
            LINE * 40,
            ["device=cpu", "select=quest", "dense_below=0"],
            "tiny: prompts by quest, topk, sparsity=0.5; new tokens dense\n",
            "A CPU runs PyTorch instead of the kernels: sparse attention saves time in long",
        ),
    ],
)
def test_dense_passes_are_described_as_such(
    msattn: Run,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str,
    overrides: list[str],
    described: str,
    note: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(break_even, "BREAK_EVEN", BREAK_EVEN)
    monkeypatch.setattr(break_even, "DECODING_COST", DECODING_COST)
    code, out, err = msattn("generate", "--prompt", prompt, "max_new_tokens=2", *overrides)
    assert code == 0, err
    assert re.match(described, out), out
    notes = out.splitlines()
    notes = notes[1 + next(i for i, line in enumerate(notes) if line.startswith("The first ")) :]
    assert (len(notes), note in "".join(notes)) == (bool(note), True), out


@pytest.mark.slow
def test_query_heads_read_buckets_of_their_own_where_it_is_asked(msattn: Run, here: Path) -> None:
    prompt, stats = "def add(first, second):\n    return first + second\n" * 40, {}
    for independent in (False, True):
        cfg = compose.compose(
            "generate",
            ["dense_below=0", "probes=1", "max_new_tokens=2", f"independent={independent}"],
        )
        stats[independent] = generate(cfg, prompt)["sparse"].stats["selectivity"]
    assert stats[False] != stats[True], (
        "the heads of a group choose different buckets, of different sizes"
    )
    assert all(0 < share < 1 for share in stats.values())
    code, _, err = msattn("serve", "independent=true")
    assert (code, err) == (2, "msattn: unknown key independent\n")


def test_errors_of_the_job_are_one_line(
    msattn: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = MagicMock()
    monkeypatch.setattr(Command, "run", job)
    job.side_effect = UserError("data.path=x: no such\nfile")
    assert msattn("train-gate") == (2, "", "msattn: data.path=x: no such file\n")
    job.side_effect = KeyboardInterrupt("saved in out; resume=true continues")
    assert msattn("train-gate") == (
        130,
        "",
        "msattn: interrupted: saved in out; resume=true continues\n",
    )
    job.side_effect = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    )
    memory = (
        "the GPU has too little memory (CUDA out of memory); reduce mta.blocks or train.batch_size"
    )
    assert msattn("train-mta") == (2, "", f"msattn: device=cuda: {memory}\n")
    job.side_effect = RuntimeError("broken")
    # the interpreter prints the traceback and exits with 1
    with pytest.raises(RuntimeError, match="broken"):
        cli.main(["train-gate"])


def test_other_ranks_write_no_run_folder(
    msattn: Run, here: Path, job: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert msattn("train-gate")[0] == 0
    assert len(job) == 1
    assert not list((here / "outputs/tiny/base/runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "number", "expected"),
    [
        ("msattn train-", 1, "train-gate"),
        ("msattn train-gate model=ll", 2, "model=llama3"),
        ("msattn train-gate model = ll", 4, "llama3"),
        ("msattn eval --multirun probes=4 select = to", 6, "topk"),
    ],
)
def test_completion(words: str, number: int, expected: str) -> None:
    env = {
        **os.environ,
        "_MSATTN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(number),
    }
    done = subprocess.run(MSATTN, env=env, capture_output=True, text=True, check=False)
    assert expected in done.stdout.split(), done.stderr


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "msattn", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("msattn ")


def test_doctor_takes_a_model_as_other_commands_do(msattn: Run) -> None:
    code, out, _ = msattn("doctor", "--model", "tiny")
    assert (code, out) == (0, msattn("doctor", "tiny")[1])
    assert msattn("doctor", "tiny", "--model", "smollm2")[::2] == (
        2,
        "msattn: --model smollm2 and tiny: give one of the two\n",
    )
