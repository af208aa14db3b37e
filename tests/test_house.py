"""Structure of the project: packages, import order, side effects of imports, documents and their commands."""

import ast
import importlib.metadata
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msattn.kernels.operations import OPERATIONS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = {"": ROOT, "kernels": ROOT / "kernels", "trainer": ROOT / "trainer", "conf": ROOT / "conf"}
LEVELS = {  # a module imports from its own room, or from lower levels; the longest matching prefix counts
    "kernels.operations": 0,
    "kernels.types": 0,
    "kernels.tuned": 0,
    "kernels.common": 1,
    "kernels.reference": 2,
    "kernels.testing": 2,
    "kernels": 3,  # operations
    "kernels.bench": 4,
    "trainer.errors": 5,
    "trainer.config": 6,
    "trainer.artifacts": 7,
    "trainer.data": 7,
    "trainer.models": 7,
    "trainer.training": 8,
    "trainer.embedded": 9,
    "trainer.mta": 9,
    "trainer.saap": 9,
    "trainer.seer": 9,
    "trainer.finetune": 10,
    "trainer.serving": 10,
    "trainer.attach": 11,
    "trainer.evaluate": 12,
    "trainer.commands": 13,
    "trainer": 13,
    "cli": 14,
}
INSTALLS_AS = {"faiss-cpu": "faiss", "hydra-core": "hydra", "huggingface-hub": "huggingface_hub", "pyyaml": "yaml"}


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package: its name under msattn, its file."""
    for name, folder in FOLDERS.items():
        for path in sorted(folder.glob("*.py") if folder == ROOT else folder.rglob("*.py")):
            parts = [name, *path.relative_to(folder).with_suffix("").parts]
            yield ".".join(part for part in parts if part and part != "__init__"), path


MODULES = dict(sources())


def imports(path: Path, *, at_import_only: bool = False) -> set[str]:
    """Dotted names that a file imports; with ``at_import_only`` just those that run when the file is imported."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def room(module: str) -> str:
    """The longest prefix of ``module`` that has a level; of an operation, its own module or folder."""
    prefixes = [name for name in LEVELS if module == name or module.startswith(f"{name}.")]
    longest = max(prefixes, key=len)
    return ".".join(module.split(".")[:2]) if longest == "kernels" else longest


def level(module: str) -> int:
    return LEVELS.get(room(module), LEVELS["kernels"])


def ours(path: Path) -> set[str]:
    """Modules of msattn that a file imports."""
    names = {name.removeprefix("msattn.") for name in imports(path) if name.startswith("msattn.")}
    return {name for name in names if name in MODULES or name.rsplit(".", 1)[0] in MODULES} & set(MODULES)


def test_every_package_on_disk_is_listed() -> None:
    """A package that is not listed imports in an editable install and is missing from the wheel."""
    on_disk = {"msattn", "msattn.kernels", "msattn.conf", "msattn.trainer"}
    for folder in ("kernels", "trainer"):
        for path in (ROOT / folder).rglob("__init__.py"):
            on_disk.add(".".join(("msattn", *path.parent.relative_to(ROOT).parts)))
    assert set(SETUPTOOLS["packages"]) == on_disk == set(SETUPTOOLS["package-dir"])
    assert not (ROOT / "kernels/__init__.py").exists(), "it would shadow Hugging Face's package of that name"
    assert not (ROOT / "conftest.py").exists()
    with_modules = {path.parent for path in (ROOT / "trainer").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in with_modules)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy of the tree as ``make dist`` builds them."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("conf", "kernels", "trainer"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "cli.py"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist")]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return copy / "dist"


@pytest.mark.slow
def test_the_wheel_holds_what_the_disk_holds(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    held = {name.removeprefix("msattn/") for name in zipfile.ZipFile(wheel).namelist() if name.startswith("msattn/")}
    data = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "trainer/embedded/model").glob("*")]
    files = {"__init__.py", "cli.py", *(str(path.relative_to(ROOT)) for path in data)}
    files |= {str(path.relative_to(ROOT)) for name in ("conf", "kernels", "trainer") for path in (ROOT / name).rglob("*.py")}
    assert held == files
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert files <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_environment(distributions: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment's folder, which no ``.pth`` file extends: msattn itself from the wheel alone."""
    (wheel,) = distributions.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    purelib = ("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (site,) = subprocess.run([python, *purelib], capture_output=True, text=True, check=True).stdout.split()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = subprocess.run([python, "-c", "import msattn; print(msattn.__file__)"], capture_output=True, text=True, check=True)
    assert where.stdout.startswith(site)
    doctor = subprocess.run([tmp_path / "env/bin/msattn", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert doctor.returncode == 0, doctor.stderr
    assert "torch" in doctor.stdout
    shown = ["msattn", "train-gate", "--cfg", "job"]
    composed = subprocess.run(
        [tmp_path / "env/bin" / shown[0], *shown[1:]], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "block_size" in composed.stdout


@pytest.mark.parametrize("module", MODULES)
def test_imports_stay_in_the_room_or_go_down(module: str) -> None:
    """No import upwards, none between rooms of one level: so there is no circle of rooms, and no operation imports another."""
    if module in ("", "conf"):
        return  # the public API is lazy; conf is data
    found = {name for name in ours(MODULES[module]) if name and name != "conf" and room(name) != room(module)}
    packages = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
    wrong = {name for name in found - packages if level(name) >= level(module)}
    assert not wrong, f"{module} (level {level(module)}) imports {sorted(wrong)}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("kernels.")])
def test_kernels_know_tensors_alone(module: str) -> None:
    everything = imports(MODULES[module])
    assert not {name.split(".")[0] for name in everything} & {"transformers", "hydra", "omegaconf", "wandb"}
    assert not any(name.startswith(("msattn.trainer", "msattn.conf", "msattn.cli")) for name in everything)
    if module.startswith(("kernels.reference", "kernels.types", "kernels.operations")):
        third_party = {name.split(".")[0] for name in everything} - set(sys.stdlib_module_names)
        assert third_party <= {"torch", "msattn"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_uses_its_own_reference_alone(operation: str) -> None:
    """The reference's public form: ``reference.<operation>``, with a suffix for passes and parts."""
    parts = {"best_blocks": {"block_softmax"}, "nearest_centroid": {"bucket_sums"}}.get(operation, set())
    for name, path in MODULES.items():
        if name != f"kernels.{operation}" and not name.startswith(f"kernels.{operation}."):
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "reference"}
        assert all(each.startswith(operation) or each in parts for each in used), f"{name} uses reference.{sorted(used)}"
        assert not any(each.startswith("msattn.kernels.reference.") for each in imports(path) if each not in MODULES)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_kernel_reference_and_tests(operation: str) -> None:
    import msattn
    from msattn.kernels import reference

    public = getattr(importlib.import_module(OPERATIONS[operation].module), operation)
    assert getattr(msattn, operation) is public
    assert callable(getattr(reference, operation))
    assert (ROOT / f"tests/kernels/test_{operation}.py").is_file()
    assert OPERATIONS[operation].differentiable == hasattr(reference, f"{operation}_backward")


def test_the_registry_lists_every_operation_on_disk() -> None:
    shared = {"common", "reference", "bench", "operations", "testing", "tuned", "types"}
    on_disk = {path.stem for path in (ROOT / "kernels").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert on_disk - shared == set(OPERATIONS)


def test_the_root_exports_lazily_what_it_lists() -> None:
    import msattn

    assert set(msattn.__all__) == {"SelectConfig", "UserError", "__version__", "attach", "load", *OPERATIONS}
    assert set(msattn.__all__) <= set(dir(msattn))
    assert all(getattr(msattn, name) is not None for name in msattn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        msattn.attend  # noqa: B018


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every docstring in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


def test_docstrings_state_and_do_not_ask() -> None:
    questions = re.compile(r"(What|Where|How|Whether|When|Who|Whose|Which|Why)\b")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in (*MODULES.values(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py")))
        for line, text in docstrings(path)
        if questions.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["kernels", "trainer"])
def test_every_folder_says_what_it_is_for(folder: str) -> None:
    for path in (ROOT / folder).rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path.relative_to(ROOT)} has no docstring"


def test_the_figures_are_drawn_from_the_kept_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/figures", tmp_path / "figures", ignore=shutil.ignore_patterns("*.svg"))
    subprocess.run([sys.executable, str(tmp_path / "figures/draw.py")], check=True)
    drawn = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == {path.name for path in (ROOT / "docs/figures").glob("*.svg")}
    assert len(drawn) == 6


def test_what_is_imported_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["gpu"]]
    declared = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}
    declared = {INSTALLS_AS.get(name, name) for name in declared} | {"msattn"}
    used = {name.split(".")[0] for path in MODULES.values() for name in imports(path)} - set(sys.stdlib_module_names)
    assert used <= declared


def test_constraints_pin_versions_and_nothing_else() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    pinned = {line.split("==")[0] for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["dev"]]
    assert {re.split(r"[^A-Za-z0-9_-]", requirement)[0].lower().replace("_", "-") for requirement in wanted} <= pinned


LIGHT = [
    "msattn",
    "msattn.cli",
    "msattn.trainer.config",
    "msattn.trainer.commands.compose",
    "msattn.trainer.commands.doctor",
    "msattn.trainer.commands.demo",
]


def test_light_modules_import_nothing_heavy() -> None:
    script = (
        f"import importlib, sys\nfor name in {LIGHT}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'triton', 'hydra', 'wandb', 'faiss', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


PURITY = """
import importlib, os, socket, sys, threading

def refuse(*arguments, **named):
    raise AssertionError("an import reached for the network")

import torch, transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    return dict(os.environ), os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), \\
        sorted(ALL_ATTENTION_FUNCTIONS), sorted(ALL_MASK_ATTENTION_FUNCTIONS), threading.active_count(), sorted(os.listdir("."))

socket.socket.connect = socket.getaddrinfo = refuse
before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert state() == before, "an import changed what lies outside the package"
assert not torch.cuda.is_initialized()
lazy = {"wandb", "faiss", "hydra", "matplotlib"} & set(sys.modules)
assert not lazy, f"imported before they are needed: {lazy}"
"""


def test_importing_any_module_changes_nothing(tmp_path: Path) -> None:
    names = [f"msattn.{name}" if name else "msattn" for name in MODULES]
    done = subprocess.run([sys.executable, "-c", PURITY, *names], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_machine_without_the_optional_libraries_imports_everything(tmp_path: Path) -> None:
    script = (
        "import importlib, sys\nfor name in ('hydra', 'omegaconf', 'wandb', 'faiss', 'datasets', 'matplotlib', 'typer'):\n"
        "    sys.modules[name] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    )
    names = [f"msattn.{name}" if name else "msattn" for name in MODULES if name != "cli"]
    done = subprocess.run([sys.executable, "-c", script, *names], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_transformers_finds_no_kernels_package_of_ours() -> None:
    """transformers probes for Hugging Face's ``kernels``; with the root on sys.path it must not take ours for it."""
    script = (
        "import sys, importlib.util\nimport transformers\nfrom transformers.utils import is_kernels_available\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None or not spec.origin.startswith(sys.argv[1]), spec\n"
        "assert not is_kernels_available() or spec.origin is not None"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, str(ROOT)], cwd=ROOT, env=environment, check=True)


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(document: str) -> list[str]:
    text = "\n".join(blocks(document, "bash")).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()]


def overrides_of(words: list[str]) -> list[str]:
    """The Hydra overrides of a command line; of a sweep, its first point."""
    found, rest = [], iter(words)
    for word in rest:
        if word in ("--prompt", "--prompt-file", "--config-dir", "--cfg"):
            next(rest)
        elif not word.startswith("-"):
            found.append(word if re.search(r"[\[{]", word) else word.split(",")[0])
    return found


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md", "docs/kernels.md"])
def test_the_documents_commands_are_real(document: str) -> None:
    """Every msattn line composes, every make target stands in the Makefile, every Python block parses."""
    from msattn.trainer.commands.compose import COMMANDS, compose

    found = commands(document)
    assert len(found) > 3
    for line in found:
        program, *words = shlex.split(line)
        if program == "torchrun":
            program, *words = words[words.index("msattn") :]
        if program == "make":
            assert all(
                re.search(rf"^{re.escape(word)}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE) for word in words
            )
        elif program == "msattn" and words[0] in COMMANDS:
            assert compose(words[0], overrides_of(words[1:])), line
        elif program == "msattn":
            assert words[0] in ("demo", "doctor", "--help", "--install-completion"), line
        else:
            assert program in ("pip", "git", "python", "cd"), f"{document}: {line}"
    for block in blocks(document, "python"):
        compile(block, document, "exec")


def run_example(number: int, folder: Path) -> dict[str, Any]:
    """Names that a Python block of docs/kernels.md defines; run from a file, because Triton reads its functions' source."""
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
    exact = flash_decode(q.double(), k.double(), v.double(), causal=True, score_mod=mod, backend="torch")
    actual, plain = (flash_decode(q, k, v, causal=True, score_mod=mod, backend=backend) for backend in ("triton", "torch"))
    for name in ("out", "lse"):
        assert_within_budget(name, *(getattr(x, name) for x in (actual, exact, plain)))


def test_the_kernels_document_has_every_operation() -> None:
    """A row of the table, a section, and a command that measures it."""
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    measured = {word for line in commands("docs/kernels.md") for word in shlex.split(line) if word.startswith("op=")}
    assert set(re.findall(r"^\| \[`(\w+)`\]\(#\1\)", text, flags=re.MULTILINE)) == set(OPERATIONS)
    assert {heading for heading in re.findall(r"^## (\w+)$", text, flags=re.MULTILINE) if "_" in heading} == set(OPERATIONS)
    assert measured == {f"op={name}" for name in OPERATIONS}


DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for folder in (".", "docs", "outputs", ".github") for path in (ROOT / folder).glob("*.md")
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_within_the_documents_hold(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


def test_versions_agree() -> None:
    import msattn

    assert msattn.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("msattn")
    assert f"## {msattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()
