"""Builds the site from the documents as they are: mkdocs calls the ``on_`` functions, mkdocstrings
the ``Runtime`` extension.

Documents are written for GitHub. Here README.md becomes the home page, links to other files of the
repository lead to GitHub, and ``<picture>`` becomes the two images between which the site's palette
chooses. Pages of the reference are made from the package: its public functions, and the help of its
command line.
"""

import posixpath
import re
import shlex
import shutil
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "build/package/msattn"  # mkdocs.yml names it
# documents outside docs/, and their places in the site
MOVED = {"README.md": "index.md", "CHANGELOG.md": "changes.md"}
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(.*?)">\s*<img '
    r"(.*?)>\s*</picture>",
    re.DOTALL,
)
# or code, which stays
LINK = re.compile(r"^```.*?^```|`[^`\n]+`|(\]\()([^)#:\s]+)(?=[)#])", re.DOTALL | re.MULTILINE)


def on_startup(command: str, dirty: bool) -> None:
    """Makes a folder of links in which mkdocstrings, which imports nothing, finds the package
    msattn alone.
    """
    shutil.rmtree(PACKAGE, ignore_errors=True)
    (PACKAGE / "kernels").mkdir(parents=True)
    (PACKAGE / "kernels/__init__.py").touch()
    for path in (ROOT / "__init__.py", ROOT / "trainer", *(ROOT / "kernels").iterdir()):
        (PACKAGE / path.relative_to(ROOT)).symlink_to(path)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside ``docs/``, and the pages of the reference."""
    for source, page in MOVED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for name, write in (
        ("python", python),
        ("kernels", kernels),
        ("commands", commands),
        ("settings", settings),
    ):
        files.append(File.generated(config, f"reference/{name}.md", content=write()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns a document with links and pictures of the site."""
    if page.file.abs_src_path is None:  # made here
        return markdown
    folder = Path(page.file.abs_src_path).parent
    markdown = PICTURE.sub(picture, markdown)
    if "<picture" in markdown:
        raise PluginError(
            f"{page.file.src_uri}: a <picture> is not in the form that docs/site.py reads"
        )
    shown = {file.src_uri for file in files if file.inclusion.is_included()}
    here = posixpath.dirname(page.file.src_uri)
    return LINK.sub(partial(link, folder, here, str(config.repo_url), shown), markdown)


def picture(found: re.Match[str]) -> str:
    """Returns two images, of which the theme shows the one for its palette."""
    dark, image = found.groups()
    light, text = (re.search(rf'{name}="(.*?)"', image)[1] for name in ("src", "alt"))
    return f"![{text}]({light}#only-light)\n![{text}]({dark}#only-dark)"


def link(
    folder: Path, here: str, repository: str, shown: Collection[str], found: re.Match[str]
) -> str:
    """Returns the beginning of a link, from a page in the folder ``here`` of the site, to a file
    that ``folder`` names: to the ``shown`` files of the site, or to the repository.
    """
    path = (folder / (found[2] or "")).resolve()
    if not found[2] or not path.is_relative_to(ROOT) or not path.exists():
        return found[0]  # code, or a link that mkdocs reports
    target = path.relative_to(ROOT).as_posix()
    if target in MOVED:
        target = MOVED[target]
    elif (page := target.removeprefix("docs/")) != target and page in shown:
        target = page
    else:
        return f"{found[1]}{repository}/{'tree' if path.is_dir() else 'blob'}/main/{target}"
    return found[1] + posixpath.relpath(target, here)


def python() -> str:
    from msattn import __all__
    from msattn.kernels.operations import OPERATIONS

    names = sorted(
        set(__all__) - {*OPERATIONS, "__version__"}, key=lambda name: (name[0].isupper(), name)
    )
    members = {"SelectConfig": "[with_policy]", "Selection": "[from_config]"}
    members |= {
        "UntrainedScorer": "[sizes, visible, first_query]",
        "trainer.serving.attach.Sparse": "[stats, batching_config]",
    }
    blocks = (
        f"::: msattn.{name}\n    options: {{members: {members.get(name, '[]')}}}"
        for name in dict.fromkeys([*names, *members])
    )
    return "# Python API\n\n" + "\n\n".join(blocks)


def kernels() -> str:
    from msattn.kernels.operations import OPERATIONS

    about = "Maths, examples, cost and limits of each operation are in [kernels](../kernels.md)."
    return f"# Kernels API\n\n{about}\n\n" + "\n\n".join(
        f"::: msattn.{name}" for name in sorted(OPERATIONS)
    )


def commands() -> str:
    from typer.main import get_command

    from msattn.cli import app

    return help_pages("Commands", "msattn {} --help", get_command(app).commands)


def settings() -> str:
    from msattn.trainer.commands.keys import group_options

    return help_pages("Settings", "msattn help {}", group_options())


def help_pages(title: str, command: str, topics: Iterable[str]) -> str:
    """Returns a page of what ``command`` prints for each of ``topics``."""
    from typer.testing import CliRunner

    from msattn.cli import app

    text = f"# {title}\n"
    for shown in map(command.format, topics):
        done = CliRunner().invoke(
            app,
            shlex.split(shown)[1:],
            env={"COLUMNS": "80"},
            terminal_width=80,
            catch_exceptions=False,
        )
        text += f"\n## {shown}\n\n```text\n{done.output.strip()}\n```\n"
    return text


class Runtime(griffe.Extension):
    """Docstrings without Sphinx roles."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring:
            return
        text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
        if obj.path.startswith("msattn.trainer"):  # "name : description" in one line
            text = re.sub(r"^( *)(\**\w+) : ", r"\1\2\n\1    ", text, flags=re.MULTILINE)
        else:  # types with shapes
            text = re.sub(
                r"^[\w, ]+ : .*$", lambda line: line[0].replace("``", ""), text, flags=re.MULTILINE
            )
        obj.docstring.value = text
        sections = obj.docstring.parse("numpy")
        for section in sections:
            for each in (
                section.value if section.kind is griffe.DocstringSectionKind.parameters else ()
            ):
                # griffe takes a default of one of several names, or the first choice; the signature
                # has them
                each.value = None
        vars(obj.docstring)["parsed"] = sections
