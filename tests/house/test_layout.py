"""The layout of the package: levels of its rooms, what kernels may import, the registry of
operations, docstrings.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from msattn.kernels.operations import OPERATIONS
from tests.house.modules import MODULES, ROOT, imports

# a module imports from its own room, or from lower levels; the longest matching prefix counts
LEVELS = {
    "trainer.version": 0,
    "kernels.operations": 0,
    "kernels.types": 0,
    "kernels.tuned": 0,
    "kernels.common": 1,
    "kernels.reference": 2,
    "kernels.testing": 2,
    "kernels": 3,  # operations
    "kernels.bench": 4,
    "trainer.ranks": 4,
    "trainer.errors": 5,
    "trainer.memory": 5,
    "trainer.progress": 5,
    "trainer.signals": 6,
    "trainer.config": 6,
    "trainer.storage": 6,
    "trainer.artifacts": 7,
    "trainer.data": 7,
    "trainer.models": 7,
    "trainer.training": 8,
    "trainer.embedded": 9,
    "trainer.mta": 9,
    "trainer.methods": 9,
    "trainer.methods.classifier": 10,
    "trainer.methods.gate": 10,
    "trainer.finetune": 11,
    "trainer.serving": 11,
    "trainer.evaluate": 13,
    "trainer.commands": 14,
    "trainer": 14,
    "cli": 15,
    "__main__": 16,
}


def room(module: str) -> str:
    """The longest prefix of ``module`` that has a level; of an operation, its own module or
    folder.
    """
    prefixes = [name for name in LEVELS if module == name or module.startswith(f"{name}.")]
    longest = max(prefixes, key=len)
    return ".".join(module.split(".")[:2]) if longest == "kernels" else longest


def level(module: str) -> int:
    return LEVELS.get(room(module), LEVELS["kernels"])


def ours(path: Path) -> set[str]:
    """Modules of msattn that a file imports."""
    # "" is the package itself
    names = {name[7:] for name in imports(path, types=True) if name.split(".")[0] == "msattn"}
    return names & set(MODULES)


def packages(module: str) -> set[str]:
    return {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}


def test_imports_stay_in_the_room_or_go_down() -> None:
    """No import upwards, none between rooms of one level: so there is no circle of rooms, and no
    operation imports another.
    """
    wrong: dict[str, list[str]] = {}
    for module in set(MODULES) - {"", "conf"}:  # the public API is lazy; conf is data
        found = {
            name
            for name in ours(MODULES[module])
            if name and name != "conf" and room(name) != room(module)
        }
        if upwards := [
            name for name in sorted(found - packages(module)) if level(name) >= level(module)
        ]:
            wrong[f"{module} (level {level(module)})"] = upwards
    assert not wrong


def test_no_circle_of_files() -> None:
    """Not by imports for type checkers or inside functions either; a circle raises CycleError."""
    TopologicalSorter(
        {module: ours(path) - packages(module) for module, path in MODULES.items()}
    ).prepare()


def test_kernels_know_tensors_alone() -> None:
    for module in (name for name in MODULES if name.startswith("kernels.")):
        everything = imports(MODULES[module])
        roots = {name.split(".")[0] for name in everything}
        assert not roots & {"transformers", "hydra", "omegaconf", "wandb"}, module
        assert not any(
            name.startswith(("msattn.trainer", "msattn.conf", "msattn.cli")) for name in everything
        ), module
        if module.startswith(("kernels.reference", "kernels.types", "kernels.operations")):
            assert roots - set(sys.stdlib_module_names) <= {"torch", "msattn"}, module


def test_multi_token_attention_is_a_room_of_its_own() -> None:
    users = {
        module.rpartition(".")[0]
        for module, path in MODULES.items()
        if any(name.startswith("kernels.multi_token") for name in ours(path))
    }
    others = {user for user in users if not user.startswith("kernels.multi_token")}
    assert others == {"", "trainer.mta"}


def public(operation: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(OPERATIONS[operation].module), operation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_uses_its_own_reference_alone(operation: str) -> None:
    own = OPERATIONS[operation].module.removeprefix("msattn.")
    files = [path for name, path in MODULES.items() if name == own or name.startswith(f"{own}.")]
    assert files
    used = {name for path in files for name in ours(path) if "reference" in name.split(".")}
    assert {name for name in used if MODULES[name].stem != "__init__"} == {
        OPERATIONS[operation].reference.removeprefix("msattn.")
    }


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_kernel_reference_and_tests(operation: str) -> None:
    import msattn

    reference = importlib.import_module(OPERATIONS[operation].reference)
    assert getattr(msattn, operation) is public(operation)
    assert callable(getattr(reference, operation))
    room, *_, name = OPERATIONS[operation].module.split(".")[1:]
    assert list(ROOT.joinpath("tests", room).rglob(f"test_{name}.py"))
    assert OPERATIONS[operation].differentiable == hasattr(reference, f"{operation}_backward")


def test_the_registry_lists_every_operation_on_disk() -> None:
    shared = {
        "attention_sinks",
        "common",
        "reference",
        "bench",
        "operations",
        "testing",
        "tuned",
        "types",
    }
    shared |= {"decoder_layer", "unrotate"}  # plain functions
    on_disk = {
        path.stem
        for path in (ROOT / "kernels").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert on_disk - shared == {operation.module.split(".")[2] for operation in OPERATIONS.values()}


def test_the_root_exports_lazily_what_it_lists() -> None:
    import msattn

    assert set(OPERATIONS) < set(msattn.__all__)
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
        for path in (
            *MODULES.values(),
            *sorted((ROOT / "tests").rglob("*.py")),
            *sorted((ROOT / "docs").rglob("*.py")),
        )
        for line, text in docstrings(path)
        if questions.match(text)
    ]
    assert not found, "\n".join(found)


def test_every_folder_says_what_it_is_for() -> None:
    for path in (
        *(ROOT / "kernels").rglob("__init__.py"),
        *(ROOT / "trainer").rglob("__init__.py"),
    ):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), (
            f"{path.relative_to(ROOT)} has no docstring"
        )
