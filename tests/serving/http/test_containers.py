"""The Dockerfile, whose steps run here without Docker, and the board of the metrics."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.house.modules import ROOT
from tests.serving.http.running import SECONDS, eventually

MONITORING = ROOT / "docs/examples/monitoring"
AS_ROOT = ("useradd", "apt-get")  # steps that need an image of their own


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions and their arguments in each stage of the Dockerfile, those of the stage that it
    is based on first.
    """
    text = re.sub(
        r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE
    ).replace("\\\n", " ")
    found, stage = dict[str, list[tuple[str, str]]](), ""
    for name, argument in (line.split(maxsplit=1) for line in text.splitlines() if line):
        if name == "FROM":
            image, _, stage = argument.split()
            found[stage] = list(found.get(image, ()))
        else:
            found[stage].append((name, argument))
    return found


class Image:
    """Runs the instructions of a Dockerfile in a folder, which stands for ``/``, with the
    dependencies of this environment.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.found = root, root, dict[str, str]()
        # 0: without isolation
        self.env = {
            **os.environ,
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PYTHONPATH": "",
        }
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"

    def here(self, text: str) -> str:
        return re.sub(r"(?<![\w./])/(opt|home|source)\b", rf"{self.root}/\1", text)

    def run(self, name: str, argument: str) -> None:
        if name == "WORKDIR":
            self.folder = Path(self.here(argument))
            self.folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY" and "--from" in argument:
            assert Path(self.here(argument.split()[1])).exists()
        elif name == "COPY":
            *sources, target = argument.split()
            for source in sources:
                is_file = (ROOT / source).is_file()
                (shutil.copy if is_file else shutil.copytree)(ROOT / source, self.folder / target)
        elif name == "RUN" and not argument.startswith(AS_ROOT):
            subprocess.run(
                ["sh", "-c", self.here(argument)], cwd=self.folder, env=self.env, check=True
            )
            for site in self.root.glob("opt/msattn/lib/python*/site-packages"):
                (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
                # older than what the build needs
                shutil.rmtree(site / "setuptools", ignore_errors=True)
        elif name == "ENV":
            self.env |= {
                key: os.path.expandvars(self.here(value))
                for key, value in (x.split("=", 1) for x in argument.split())
            }
        self.found[name] = argument

    def command(self, name: str, port: int) -> list[str]:
        """The program of an instruction, with another port."""
        return json.loads(
            re.sub("8000", str(port), self.found[name][self.found[name].index("[") :])
        )


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    built = Image(tmp_path)
    monkeypatch.setenv("PATH", built.env["PATH"])  # which ENV extends
    for stage in ("build", "cpu"):
        for instruction in stages()[stage]:
            built.run(*instruction)
    return built


def shown() -> Iterator[str]:
    """Names of the metrics on the board."""
    for panel in json.loads((MONITORING / "board.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield from re.findall(r"\bmsattn_\w+", target["expr"])


@pytest.mark.slow
def test_the_image_serves_and_the_board_shows_its_metrics(image: Image) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    health = image.command("HEALTHCHECK", port)
    command = [
        *image.command("ENTRYPOINT", port),
        "device=cpu",
        "dense_below=0",
        "server.pages=16",
        "server.max_length=1024",
    ]

    def healthy() -> bool:
        assert server.poll() is None
        return (
            subprocess.run(health, env=image.env, capture_output=True, check=False).returncode == 0
        )

    assert subprocess.run(health, env=image.env, capture_output=True, check=False).returncode == 1
    with subprocess.Popen(command, cwd=image.folder, env=image.env) as server:
        try:
            eventually(healthy)
            asked = {"model": "tiny", "prompt": "def main(arguments):" * 20, "max_tokens": 2}
            httpx.post(
                f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=SECONDS
            ).raise_for_status()
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
    exported = {
        name
        for name in re.findall(r"^msattn_\w+", metrics, flags=re.MULTILINE)
        if not name.endswith("_created")
    }
    assert set(shown()) == {name for name in exported if not name.endswith(("_sum", "_count"))}


def test_containers_run_without_root_and_agree_on_ports() -> None:
    found = stages()
    compose = yaml.safe_load((MONITORING / "compose.yaml").read_text())
    server = compose["services"]["msattn"]
    assert (MONITORING / server["build"]["context"]).resolve() == ROOT
    for target in ("cpu", "cuda"):
        assert [argument for name, argument in found[target] if name == "USER"] == ["msattn"]
        assert found[target][-1][0] == "USER"
    assert server["build"]["target"] == "${TARGET:-cpu}"
    (port,) = (argument for name, argument in found["cpu"] if name == "EXPOSE")
    prometheus = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": [f"msattn:{port}"]}]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    for service in compose["services"].values():
        assert {each["source"] for each in service.get("configs", ())} <= set(compose["configs"])
