"""A stand-in for the Hugging Face Hub: an HTTP server with the endpoints that pushes and downloads
call.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import yaml

TOKEN, READER = "hf_standinTokenOfSomeone", "hf_standinTokenThatReads"
CUT = 0  # instead of a status: the connection ends without an answer
HANG = -1  # there is no answer


@dataclass
class Repository:
    """A repository: its commits, the newest last, each with its id and files."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((digest, files))
        return digest

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((each for each in self.commits if each[0] == revision), None)


@dataclass
class Hub:
    """The state of the server.

    Attributes
    ----------
    faults : statuses (or :data:`CUT`, :data:`HANG`) of requests whose method and path contain the
        key, such as ``PUT /lfs``.
    calls : methods and paths of all requests.
    ended : set when the server ends.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def create(self, name: str, private: bool = False, **files: bytes) -> Repository:
        self.repositories[name] = Repository(private)
        self.repositories[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"} | files)
        return self.repositories[name]

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name].commits[-1][1]


@contextmanager
def serving() -> Iterator[Hub]:
    """Runs the server on a free port of this machine alone."""
    hub = Hub()

    class OfHub(Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), OfHub)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, a token for it, and an empty cache."""
    with serving() as found:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # content goes to the Hub by HTTP alone
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(
            "huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None)
        )
        yield found
        huggingface_hub.utils.close_session()


class Handler(BaseHTTPRequestHandler):
    """Answers requests as the Hub does; files that end with safetensors are LFS files."""

    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def _answer(self, handle: Any) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        call = f"{self.command} {path}"
        self.state.calls.append(call)
        for fragment, status in self.state.faults.items():
            if fragment in call:
                self.close_connection = True
                if status == HANG:
                    self.state.ended.wait()
                refusal = {"error": f"refused {self.headers['Authorization']}"}
                # told of the end, the client does not send its next request into a connection that
                # is about to end
                return (
                    None
                    if status in (CUT, HANG)
                    else self._send(status, refusal, Connection="close")
                )
        return handle(path, body)

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        content = self.rfile.read(size)
        self.rfile.readline()
        return content

    def _send(self, status: int, content: Any = None, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _user(self) -> str | None:
        return {f"Bearer {TOKEN}": "someone", f"Bearer {READER}": "reader"}.get(
            self.headers.get("Authorization", "")
        )

    def _repository(self, name: str) -> Repository | None:
        """Returns a repository that the user may see; otherwise answers."""
        found = self.state.repositories.get(name)
        if found is None or (found.private and self._user() != name.partition("/")[0]):
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return found

    def _get(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, what = "/".join(parts[2:4]), parts[4:]
            revision = what[1] if what else "main"
        elif len(parts) < 4:
            return self._send(404)
        else:
            name, what, revision = "/".join(parts[:2]), parts[2:], parts[3]
        repository = self._repository(name)
        if repository is None:
            return None
        found = repository.at(revision)
        if found is None:
            return self._send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        commit, files = found
        if what[:1] == ["tree"]:
            return self._send(200, [entry(file, content) for file, content in files.items()])
        if what[:1] == ["resolve"]:
            file = "/".join(what[2:])
            if file not in files:
                return self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            etag = f'"{entry(file, files[file])["oid"]}"'
            return self._send(200, files[file], ETag=etag, X_Repo_Commit=commit)
        siblings = [{"rfilename": file} for file in files]
        return self._send(
            200, {"id": name, "sha": commit, "private": repository.private, "siblings": siblings}
        )

    def _post(self, path: str, body: bytes) -> None:
        user = self._user()
        if user is None:
            return self._send(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self._create(user, json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        name = (
            path.removeprefix("/api/models").strip("/").removesuffix(".git/info/lfs/objects/batch")
        )
        name, *what = ("/".join(name.split("/")[:2]), *name.split("/")[2:])
        repository = self._repository(name)
        if repository is None:
            return None
        if user != name.partition("/")[0]:
            return self._send(403, {"error": "Forbidden"})
        files = repository.commits[-1][1]
        if what[:1] == ["preupload"]:
            return self._send(
                200, {"files": [mode(each["path"], files) for each in json.loads(body)["files"]]}
            )
        if what[:1] == ["commit"]:
            return self._commit(repository, name, [json.loads(line) for line in body.splitlines()])
        upload = {"upload": {"href": f"{self.state.url}/lfs"}}
        objects = [
            each | {"actions": {"upload": {"href": f"{upload['upload']['href']}/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        return self._send(200, {"transfer": "basic", "objects": objects})

    def _create(self, user: str, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if user != asked["organization"]:
            return self._send(
                403, {"error": "You don't have the rights to create a model under this namespace"}
            )
        url = {"url": f"{self.state.url}/{name}"}
        if name in self.state.repositories:
            return self._send(409, {"error": "You already created this model repo", **url})
        self.state.create(name, asked.get("visibility") == "private")
        return self._send(200, url)

    def _validate(self, content: str) -> None:
        try:
            found = yaml.safe_load(content.split("---\n")[1])
            assert isinstance(found.get("tags", []), list)
        except (yaml.YAMLError, IndexError, AssertionError):
            return self._send(400, {"errors": [{"message": "invalid metadata"}]})
        return self._send(200, {"errors": [], "warnings": []})

    def _put(self, path: str, body: bytes) -> None:
        """Keeps an upload. As at the storage service, the token of the Hub is not sent there."""
        assert "Authorization" not in self.headers
        assert hashlib.sha256(body).hexdigest() == path.rsplit("/", 1)[1]
        self.state.uploads[path.rsplit("/", 1)[1]] = body
        self._send(200, {})

    def _commit(self, repository: Repository, name: str, lines: list[dict[str, Any]]) -> None:
        files = dict(repository.commits[-1][1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files)
        self._send(
            200, {"commitUrl": f"{self.state.url}/{name}/commit/{commit}", "commitOid": commit}
        )


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


def mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """Returns the answer of ``preupload`` for a file."""
    found = {
        "path": path,
        "uploadMode": "lfs" if is_lfs(path) else "regular",
        "shouldIgnore": False,
    }
    return found | ({"oid": entry(path, files[path])["oid"]} if path in files else {})


def entry(path: str, content: bytes) -> dict[str, Any]:
    """Returns the entry of a file in ``tree``: with its hash in git, or of an LFS file its
    SHA-256.
    """
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    found = {"type": "file", "path": path, "size": len(content), "oid": git}
    if is_lfs(path):
        sha = hashlib.sha256(content).hexdigest()
        found |= {"oid": sha, "lfs": {"oid": sha, "size": len(content), "pointerSize": 130}}
    return found
