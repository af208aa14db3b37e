"""The modules of the package and what each imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "docs/experiments"  # the papers' are its group `experiment`
FOLDERS = {
    "": ROOT,
    "kernels": ROOT / "kernels",
    "trainer": ROOT / "trainer",
    "conf": ROOT / "conf",
}


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package: its name under msattn, its file."""
    for name, folder in FOLDERS.items():
        for path in sorted(folder.glob("*.py") if folder == ROOT else folder.rglob("*.py")):
            parts = [name, *path.relative_to(folder).with_suffix("").parts]
            yield ".".join(part for part in parts if part and part != "__init__"), path


MODULES = dict(sources())


def imports(path: Path, *, types: bool = False) -> set[str]:
    """Dotted names that a file imports; ``types``: also those for type checkers."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found
