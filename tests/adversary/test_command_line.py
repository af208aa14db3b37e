"""Hostile command lines: values of every key, malformed overrides and options, and runs at the ends
of ranges.
"""

import copy
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from msattn.trainer.commands.compose import compose, compose_raw, initialized_hydra, without_hydra
from msattn.trainer.commands.jobs import COMMANDS, Command
from msattn.trainer.config import POLICIES, typed
from msattn.trainer.config.policies import OWN_KEYS, own_keys
from msattn.trainer.config.schema import accepted
from tests.adversary.tries import Tries, spread

HUGE = int("9" * 30)
LIMIT = 2**32  # no integer beyond is sane
VALUES: dict[str, Any] = {  # the text of a value, and its meaning in Hydra's grammar
    "": "",
    "' '": " ",
    "'1'": "1",
    "1.0": 1.0,
    "1e3": 1000.0,
    "1e400": math.inf,
    "0": 0,
    "-1": -1,
    "1": 1,
    str(HUGE): HUGE,
    str(-(2**63) - 1): -(2**63) - 1,
    "nan": math.nan,
    "null": None,
    "true": True,
    "'false'": "false",
    "[]": [],
    "[1]": [1],
    "['1']": ["1"],
    "[[1]]": [[1]],
    "[true,nan]": [True, math.nan],
    f"[{HUGE}]": [HUGE],
    "{a:1}": {"a": 1},
    "${nowhere}": None,
    "${oc.env:MSATTN_HOSTILE}": "from the environment",
    # quotes do not change that, a backslash does
    "'${oc.env:MSATTN_HOSTILE}'": "from the environment",
    "'\\${oc.env:MSATTN_HOSTILE}'": "${oc.env:MSATTN_HOSTILE}",
    "???": None,
    "x" * 10_000: "x" * 10_000,
    "'a\0b'": "a\0b",
    "'a\nb'": "a\nb",
    "'\udce9'": "\udce9",
    "'١٢'": "١٢",
    "../../x": "../../x",
}


def leaves_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the name and annotation of every key of a schema that is no section."""
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            yield from leaves_of(item.type, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item.type


COMMAND_OF = {
    name: command
    for command in reversed(COMMANDS)
    for name, _ in leaves_of(COMMANDS[command].schema)
}
KEYS = {  # one of each type, whatever its range
    re.sub(r" in [\[(][^\])]*[\])]", "", accepted(kind)): name
    for command in COMMANDS
    for name, kind in leaves_of(COMMANDS[command].schema)
}


def base_overrides(command: str, key: str) -> tuple[str, ...]:
    """Returns overrides with which ``command`` composes and has ``key``."""
    owners = [name for name in POLICIES if key.removeprefix("select.") in own_keys(name)]
    if key.startswith("select.") and owners:
        return (f"select={owners[0]}", "artifacts.gate=gate")
    return ("artifacts.gate=gate",) if command == "finetune" else ()


@functools.cache
def composed_once(command: str, overrides: tuple[str, ...]) -> Any:
    with initialized_hydra(command) as hydra:
        return without_hydra(compose_raw(hydra, command, overrides))


def compose_value(command: str, key: str, text: str) -> Any:
    """Returns what ``compose`` returns for ``key=text``, with the other keys composed once, which
    is faster.
    """
    overrides = base_overrides(command, key)
    config = copy.deepcopy(composed_once(command, overrides))
    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
        OmegaConf.update(config, key, value, merge=True)
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError):
        return compose(command, [*overrides, f"{key}={text}"])
    return typed(config, COMMANDS[command].schema)


def value_of(config: Any, key: str) -> Any:
    """Returns the value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def is_meant(found: Any, value: Any, key: str) -> bool:
    """Returns True if ``found`` is the ``value`` of ``key``, a number as one of its type and an
    integer as text, and sane.
    """
    if value is None and key in {f"select.{name}" for name in OWN_KEYS}:
        return found is not None  # the default of the policy
    if isinstance(value, list):
        return (
            isinstance(found, list)
            and len(found) == len(value)
            and all(map(is_meant, found, value, [key] * len(value)))
        )
    if isinstance(value, dict):
        return isinstance(found, dict) and value.items() <= found.items()  # Hydra merges mappings
    if isinstance(found, str):
        return found == str(value) and not isinstance(value, bool | float) and found.isprintable()
    return (
        found == value
        and isinstance(found, bool) == isinstance(value, bool)
        and (found is None or abs(found) <= LIMIT)
    )


@pytest.mark.slow
def test_values_of_keys(tries: Tries, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each type of a key with each value: what is no choice, out of range or of another type is
    refused.
    """
    monkeypatch.setenv("MSATTN_HOSTILE", "from the environment")
    for key, text in product(KEYS.values(), VALUES):
        tries.python(
            f"{key}={text[:40]!r}",
            lambda key=key, text=text: compose_value(COMMAND_OF[key], key, text),
            lambda config, key=key, text=text: is_meant(value_of(config, key), VALUES[text], key),
        )


BROKEN = """
' " [ ] { } ( ) [1 [1, {a {a: ${ ${} $ \\ = , 1, ,1 1,2 choice(1,2) range(1,3) interval(0,1) glob(*)
sort(2,1) shuffle(1,2)
tag(x,1) extend_list(1) nothing(1) int( int(1,2) int('x') ${seed ${${seed}} ${seed:1} ${nowhere:1}
${.x} ${..} ${...} 'a'b
{{ }} {1:{2:3}} [[1,2],[3]] {null:null} !x &x *x %x @x :x :: `x` ~x #x 1# 1; 0x10 010 1e 1.. .. ١٢
１
"""
SYNTAXES: dict[str, Any] = {  # values that are refused, or that have a meaning in Hydra's grammar
    **dict.fromkeys(BROKEN.split()),
    "\u00a0": None,
    "\u2028": None,
    "9" * 5000: None,
    "[" * 3000: None,
    "[" * 1000 + "]" * 1000: None,
    "{a:" * 300 + "1" + "}" * 300: None,
    "${" * 300 + "}" * 300: None,
    "\0": None,
    "\n": None,
    "1\n2": None,
    "\ud800": None,
    "\x1b]0;x\x07": None,
    "int(7)": 7,
    "int('7')": 7,
    " 7": 7,
    "+7": 7,
}


@pytest.mark.slow
def test_syntax_of_values(tries: Tries) -> None:
    for text, key in spread(SYNTAXES, ("seed", "data.seq_len", "dense_below", "probes")):
        tries.python(
            f"{key}={text[:40]!r}",
            lambda key=key, text=text: compose_value("generate", key, text),
            lambda config, key=key, text=text: (
                SYNTAXES[text] is not None and value_of(config, key) == SYNTAXES[text]
            ),
        )


LONG = "x" * 5000
PATHS = [
    "",
    LONG,
    "a\0b",
    "a\nb",
    "\udce9",
    "~no-such-user/x",
    "nowhere",
    "/dev/zero",
    "./file/x",
    "[",
    "{a,b}",
]
OPTIONS = (
    "--model --data --config-dir --cfg --prompt --cgf -x - --- --no-model -mx --multirun=1 "
    "--chat=1 hydra=null hydra/launcher=x"
)
ENDINGS: list[list[str]] = [
    *(
        [option, path]
        for option in ("--model", "--data", "--config-dir", "--prompt-file")
        for path in PATHS
    ),
    *(["--cfg", text] for text in ("", "x", "JOB", "\0", LONG)),
    *(
        ["--multirun", text]
        for text in ("--chat", "seed=1,x", "seed=range(0,1000000000)", "seed=range(0,inf)")
    ),
    *(["--multirun", text] for text in ("seed=glob(*)", "seed=range(3,3)", "model=glob(x)")),
    *(
        ["--multirun", text]
        for text in ("seed=range(0,1,0.0)", "hydra.sweep.dir='a\0b'", f"name={LONG}", "seed=1,-1")
    ),
    *(
        [text]
        for text in ("", " ", "\0", "\udce9", "\n", "=", "==", "@", "~", "+", *OPTIONS.split(" "))
    ),
    ["--model", "tiny", "model=tiny"],
    ["--data", "a.txt", "data=stdlib"],
    ["--prompt", ""],
    ["--prompt", "\udce9"],
    ["--prompt", "a", "--prompt-file", "b"],
    ["seed=1", "seed=x"],
    ["experiment=nothing"],
    *([f"seed={text}"] for text in ("1_000", "[1_0]", "{a: 1_0}", "-1_0.5", "9" * 5000)),
]
HYDRA = f"""
run.dir=/dev/null/x run.dir= run.dir=null run.dir='a\0b' run.dir={LONG} run=null job=null
mode=nothing mode=1 job.chdir=maybe
job.env_set={{A:1}} searchpath=3 searchpath=[nowhere] verbose={{a:1}} output_subdir=/dev/null
output_subdir='a\0b'
job_logging=null job_logging.version=7 hydra_logging.root.level=nothing
callbacks={{a:{{_target_:nothing.at.all}}}}
sweeper._target_=nothing.at.all launcher._target_=nothing.at.all sweep.dir='a\0b' nothing=1
run.dir=${{nowhere}} job.name=a/b
"""
NO_COMMANDS = [
    "",
    " ",
    "train_gate",
    "EVAL",
    "eval ",
    "\0",
    "\udce9",
    "-",
    "--",
    "--version=1",
    "--halp",
    "help eval.",
    "help \0",
    *(
        f"doctor {model}"
        for model in (
            "",
            "\0",
            "\udce9",
            "nowhere",
            "../..",
            "a/b/c",
            "x" * 5000,
            "tiny tiny",
            "--private",
        )
    ),
    *(
        f"push {words}"
        for words in (
            "",
            "a",
            "\0 a/b",
            "\udce9 a/b",
            "nowhere a/b",
            ". a/b",
            "embedded a/\0",
            f"{'x' * 5000} a/b",
        )
    ),
    *(
        f"configure {words}"
        for words in (
            "",
            "\0",
            "\udce9 a=1",
            "nowhere",
            ". gate",
            ". =",
            ". select=\0",
            ". gate=\udce9",
        )
    ),
    *(
        f"import-gate {words}"
        for words in (
            "",
            "x",
            "x --out",
            "\0 --out g",
            "\udce9 --out g",
            "nowhere --out g",
            ". --out g",
        )
    ),
    *(f"import-gate . --out {out}" for out in ("\0", "\udce9", "file/g", "x" * 5000)),
]


@pytest.fixture
def started(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces all jobs in an empty folder; collects the configurations that they are called
    with.
    """
    configs: list[Any] = []
    (here / "file").touch()
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: configs.append(cfg))
    return configs


@pytest.mark.slow
def test_options(tries: Tries, started: list[Any]) -> None:
    """The job of a command that is not refused gets the configuration of the command without its
    hostile ending.
    """
    cases = [(command, ending) for ending, command in spread(ENDINGS, ("fit-kmeans", "generate"))]
    cases += [("bench", [f"hydra.{override}"]) for override in HYDRA.split()]
    expected = {command: compose(command) for command in ("fit-kmeans", "generate", "bench")}
    for command, ending in cases:
        prompt = (
            ["--prompt", "a"] if command == "generate" and "--prompt" not in str(ending) else []
        )
        started.clear()
        tries.command(
            [command, *(word[:40] for word in ending)],
            *[command, *prompt, *ending],
            right=lambda out, command=command: started == [expected[command]],
        )
    for line in NO_COMMANDS:
        tries.command(repr(line), *line.split(" "))


LINES = [
    "help", "help gate", "eval --help", "eval --cfg job", "doctor", "doctor tiny", "demo", "bench",
    "serve",
    "train-gate -m seed=1,2", "generate --prompt a", "push outputs/tiny/base a/b", "import-gate "
    "theirs --out gate",
]  # fmt: skip


def test_a_working_directory_that_was_deleted(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for line in LINES:
        tries.command(line, *line.split())
    for line in ("--version", "--help"):
        tries.command(line, line, right=lambda out: "msattn" in out, accepted=True)
