"""The documents: their commands, examples, links and figures."""

import ast
import json
import os
import re
import runpy
import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from string import Template
from typing import Any

import pytest

from msattn.kernels.operations import OPERATIONS
from tests.house.modules import ROOT


def blocks(document: str, language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL
    )


def shell_commands(text: str) -> list[str]:
    """The commands of lines of a shell, with the values of variables; of a loop, its first turn."""
    lines = [line.split("#")[0].strip() for line in text.replace("\\\n", "").splitlines()]
    assigned = [re.fullmatch(r'([A-Z]+)="(.*)"', line) for line in lines]
    variables = {each[1]: each[2] for each in assigned if each}  # also of later lines
    found = list[str]()
    for line, assignment in zip(lines, assigned, strict=True):
        if assignment:
            variables[assignment[1]] = assignment[2]
        elif loop := re.fullmatch(r"for (\w+) in (\S+) .*?; do (.*); done", line):
            variables[loop[1]] = loop[2]
            found.append(Template(loop[3]).safe_substitute(variables))
        elif line:
            found += Template(line).safe_substitute(variables).split(" && ")
    return found


def commands(document: str) -> list[str]:
    """The commands of the bash blocks of a document, and indented ones of msattn and Python."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL)
    indented = "\n".join(re.findall(r"^ {4}(.*)", text, flags=re.MULTILINE))
    programs = r"(msattn|torchrun|\S*python) "
    return [
        *shell_commands("\n".join(blocks(document, "bash"))),
        *(line for line in shell_commands(indented) if re.match(programs, line)),
    ]


WITH_VALUES = (
    "--prompt",
    "--prompt-file",
    "--model",
    "--data",
    "--cfg",
    "--host",
    "--port",
    "--api-key",
)
OTHER_COMMANDS = (
    "demo",
    "push",
    "configure",
    "import-gate",
    "doctor",
    "help",
    "--help",
    "--install-completion",
)


def overrides_of(words: list[str]) -> list[str]:
    """The Hydra overrides of a command line; of a sweep, its first point."""
    from msattn.trainer.commands.compose import with_search_path

    found, rest = [], iter(words)
    for word in rest:
        if word == "--config-dir":
            found += with_search_path([], ROOT / next(rest))
        elif word in WITH_VALUES:
            next(rest)
        elif not word.startswith("-"):
            found.append(word if re.search(r"[\[{]", word) else word.split(",")[0])
    return found


PRINTED = {  # by the scripts in docs/examples
    "server": r"( *\d+ characters -> .+\n){4}prompts read 2\d% of the blocks, new tokens [34]\d% "
    r"of the keys",
    "trained": r"dense: +48213 .*\ngate and classifier: +48213 +\(reads [23]\d% of the blocks, "
    r"1\d% of the keys in decoding\)",
    "untrained": "".join(
        rf"\d+ tokens, {share}\d% of the blocks not read: KL 0\.\d+\n" for share in (4, 7, 8)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_the_examples_run(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert re.search(PRINTED[script.stem], capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/contributing.md"])
def test_the_first_example_of_a_document_runs(
    document: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes the embedded model, without a download, and prints the statistics in its comment,
    which depend a little on the text and the machine.
    """
    example = blocks(document, "python")[0]
    exec(example, {"__name__": "example"})
    lines = re.findall(r"stats\(\)\)  # (.*)", example)[0], capsys.readouterr().out.splitlines()[-1]
    expected, printed = ([float(x) for x in re.findall(r"0\.\d+", line)] for line in lines)
    assert printed == pytest.approx(expected, abs=0.02)
    assert len({re.sub(r"0\.\d+", "", line) for line in lines}) == 1


NOTEBOOK = ROOT / "docs/examples/first_hour.ipynb"
SMOLLM2 = ROOT / "outputs/smollm2/model"


def test_the_notebook_is_tracked_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs SmolLM2, which make models brings")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "outputs/smollm2").mkdir(parents=True)
    (tmp_path / "outputs/smollm2/model").symlink_to(SMOLLM2)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert (
        len(re.findall(r"^(?:dense|gate|mean_pool, 50%.*): .*48213", printed, flags=re.MULTILINE))
        == 3
    )
    shown = [kind for output in outputs for kind in output.get("data", ())]
    assert shown.count("image/png") == 2
    assert shown.count("text/html") == 1


GUIDE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/guide").glob("*.md"))


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/contributing.md",
        "docs/kernels.md",
        "docs/results.md",
        "docs/serving.md",
        *(pytest.param(page, marks=pytest.mark.slow) for page in ("docs/measurements.md", *GUIDE)),
    ],
)
def test_the_documents_commands_are_real(document: str) -> None:
    """Every msattn line composes, every make target stands in the Makefile, every Python program
    exists, every Python block parses.
    """
    from msattn.trainer.commands.compose import compose
    from msattn.trainer.commands.jobs import COMMANDS
    from msattn.trainer.config import RunConfig

    for line in commands(document):
        program, *words = shlex.split(line)
        if program == "torchrun":
            program, *words = dropwhile(lambda word: word != "msattn" and "/" not in word, words)
        if program.endswith("python") and words[0] == "-m":
            assert find_spec(words[1]), line
        elif program.endswith((".py", "python")):
            assert (ROOT / (program if program.endswith(".py") else words[0])).is_file(), line
        elif program == "make":
            assert all(
                re.search(
                    rf"^{re.escape(word)}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
                )
                for word in words
            )
        elif program == "msattn" and words[0] in COMMANDS:
            cfg = compose(words[0], overrides_of(words[1:]))
            if (
                COMMANDS[words[0]].trains
                and isinstance(cfg, RunConfig)
                and not {"--cfg", "--data"} & set(words)
            ):
                cfg.check_text()
        elif program == "msattn":
            assert words[0] in OTHER_COMMANDS, line
        else:
            assert program in ("pip", "git", "cd", "vllm", "docker"), f"{document}: {line}"
    for block in blocks(document, "python"):
        compile(block, document, "exec")


def run_example(number: int, folder: Path) -> dict[str, Any]:
    """Names that a Python block of docs/kernels.md defines; run from a file, because Triton reads
    its functions' source.
    """
    example = folder / "example.py"
    example.write_text(blocks("docs/kernels.md", "python")[number], encoding="utf-8")
    return runpy.run_path(str(example))


@pytest.mark.parametrize("number", range(len(blocks("docs/kernels.md", "python"))))
def test_the_kernels_examples_run(number: int, tmp_path: Path) -> None:
    assert run_example(number, tmp_path)


def test_the_kernels_own_score_mod_has_equal_twins(tmp_path: Path, device: str) -> None:
    from msattn.kernels.flash_decode import flash_decode
    from msattn.kernels.testing import assert_within_budget

    names = run_example(-1, tmp_path)
    q, k, v = (names[name].to(device) for name in "qkv")
    mod = names["mod"]._replace(tensors=tuple(x.to(device) for x in names["mod"].tensors))
    exact = flash_decode(
        q.double(), k.double(), v.double(), causal=True, score_mod=mod, backend="torch"
    )
    actual, plain = (
        flash_decode(q, k, v, causal=True, score_mod=mod, backend=backend)
        for backend in ("triton", "torch")
    )
    for name in ("out", "lse"):
        assert_within_budget(name, *(getattr(x, name) for x in (actual, exact, plain)))


def test_the_kernels_document_has_every_operation() -> None:
    """A row of the table, a section, and a command that measures it."""
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    words = [
        word
        for line in commands("docs/kernels.md")
        for word in shlex.split(line)
        if word.startswith("op=")
    ]
    measured = {name for word in words for name in word.removeprefix("op=").split(",")}
    assert set(re.findall(r"^\| \[`(\w+)`\]\(#\1\)", text, flags=re.MULTILINE)) == set(OPERATIONS)
    assert {
        heading for heading in re.findall(r"^## (\w+)$", text, flags=re.MULTILINE) if "_" in heading
    } == set(OPERATIONS)
    assert measured == set(OPERATIONS)


DOCUMENTS = [
    path
    for folder in (".", "docs", "docs/guide", "outputs", ".github")
    for path in (ROOT / folder).glob("*.md")
]


def test_every_document_ends_with_a_newline() -> None:
    assert not [path for path in DOCUMENTS if not path.read_text("utf-8").endswith("\n")]


def test_the_examples_import_what_exists() -> None:
    for document in DOCUMENTS:
        for block in blocks(str(document), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("msattn"):
                    module = import_module(str(node.module))
                    missing = [name.name for name in node.names if not hasattr(module, name.name)]
                    assert not missing, (
                        f"{document.relative_to(ROOT)}: {node.module} has no {missing}"
                    )


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:kernels|trainer|conf|tests|docs|\.ci)/[\w./-]+)[` ]", text)
    within = re.findall(r"`((?:serving|methods|models|config)/[\w./]+)`", text)
    assert len(named) > 30
    assert len(within) > 15
    assert not [
        path
        for path in [*named, *(f"trainer/{path}" for path in within)]
        if not (ROOT / path).exists()
    ]


@pytest.mark.parametrize("library", ["vLLM", "transformers"])
def test_the_files_and_tests_that_serving_names_exist(library: str) -> None:
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    table = rf"^\| of {library} \| where \| test that breaks \|\n.*\n((?:\|.*\n)+)"
    (rows,) = re.findall(table, text, flags=re.MULTILINE)
    for row in rows.splitlines():
        *_, where, tests, _ = row.split("|")
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", where):
            folders = ("trainer", "trainer/serving", "trainer/serving/engines/vllm")
            assert any((ROOT / folder / name).exists() for folder in folders), name
        named = re.findall(r"`([\w/]+(?:\.py|/))(?:::(\w+))?`(?: \(fixture `(\w+)`)?", tests)
        assert named, row
        for name, test, fixture in named:
            path = ROOT / (name if "/" in name else f"tests/vllm/{name}")
            assert path.exists(), name
            for function in filter(None, (test, fixture)):
                assert f"def {function}(" in path.read_text("utf-8"), f"{name}::{function}"


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_within_the_documents_hold() -> None:
    """Every linked file and heading exists."""
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", text):
            linked = document.parent / target if target else document
            name = f"{document.relative_to(ROOT)} links to {target}#{anchor}"
            assert linked.exists(), name
            assert not anchor or anchor in anchors(linked), name
