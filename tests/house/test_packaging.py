"""The distributions: packages, contents, requirements, versions."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house.modules import MODULES, ROOT, imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
INSTALLS_AS = {
    "annotated-types": "annotated_types",
    "faiss-cpu": "faiss",
    "hydra-core": "hydra",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
}


def test_every_package_on_disk_is_listed() -> None:
    """A package that is not listed imports in an editable install and is missing from the wheel."""
    on_disk = {"msattn", "msattn.kernels", "msattn.conf", "msattn.trainer"}
    for folder in ("kernels", "trainer"):
        for path in (ROOT / folder).rglob("__init__.py"):
            on_disk.add(".".join(("msattn", *path.parent.relative_to(ROOT).parts)))
    assert set(SETUPTOOLS["packages"]) == on_disk
    assert not (ROOT / "kernels/__init__.py").exists(), (
        "it would shadow Hugging Face's package of that name"
    )
    assert not (ROOT / "conftest.py").exists()
    with_modules = {path.parent for path in (ROOT / "trainer").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in with_modules)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy of the tree as
    ``make dist`` builds them.
    """
    copy = tmp_path_factory.mktemp("source")
    for name in ("conf", "kernels", "trainer"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (
        *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")),
        *ROOT.glob("*.py"),
    ):
        shutil.copy(path, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist")]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return copy / "dist"


@pytest.mark.slow
def test_the_wheel_holds_what_the_disk_holds(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    held = {
        name.removeprefix("msattn/")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("msattn/")
    }
    data = [
        path
        for path in (ROOT / "trainer/embedded").rglob("*/*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    data += [*(ROOT / "conf").rglob("*.yaml")]
    data += [
        path
        for end in ("css", "html", "yaml")
        for path in (ROOT / "trainer/evaluate/report").glob(f"*.{end}")
    ]
    files = {str(path.relative_to(ROOT)) for path in (*MODULES.values(), *data)}
    assert held == files
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert files <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_environment(distributions: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment's folder, which no ``.pth`` file extends: msattn
    itself from the wheel alone.
    """
    (wheel,) = distributions.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    purelib = ("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (site,) = subprocess.run(
        [python, *purelib], capture_output=True, text=True, check=True
    ).stdout.split()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = subprocess.run(
        [python, "-c", "import msattn; print(msattn.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(site)
    doctor = subprocess.run(
        [tmp_path / "env/bin/msattn", "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert doctor.returncode == 0, doctor.stderr
    assert "torch" in doctor.stdout
    shown = ["msattn", "train-gate", "--cfg", "job"]
    composed = subprocess.run(
        [tmp_path / "env/bin" / shown[0], *shown[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "block_size" in composed.stdout


def required_by(*extras: str) -> set[str]:
    """Returns the names of the packages that msattn with ``extras`` requires."""
    project = PROJECT["project"]
    parts = [
        project["dependencies"],
        *(project["optional-dependencies"][extra] for extra in extras),
    ]
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for part in parts for requirement in part}


def test_what_is_imported_is_declared() -> None:
    required = required_by("cpu", "gpu", "gguf", "grammar", "harness", "serve", "vllm")
    declared = {INSTALLS_AS.get(name, name) for name in required} | {"msattn"}
    used = {name.split(".")[0] for path in MODULES.values() for name in imports(path)} - set(
        sys.stdlib_module_names
    )
    assert used <= declared


def test_constraints_pin_versions_and_nothing_else() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    pinned = {line.split("==")[0] for line in lines}
    wanted = required_by("cpu", "gguf", "harness", "serve", "docs", "dev")
    assert {name.lower().replace("_", "-") for name in wanted} <= pinned


def test_versions_agree() -> None:
    import msattn

    assert (
        msattn.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("msattn")
    )
    assert f"## {msattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {msattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
