"""A Hub on the loopback: the HTTP calls that huggingface_hub's own client makes to push and to load a model.

Repositories live in memory. Large files go the way of git LFS, so the client runs with HF_HUB_DISABLE_XET=1: the
storage protocol of Xet is not spoken here.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

#: The only account, and its token.
USER, TOKEN = "me", "hf_of_the_tests"
#: Of the Hub's list.
LICENSES = ("apache-2.0", "bsd-3-clause", "mit", "other")


@dataclass
class Repo:
    """One model repository: commit -> path -> id of the content, and which commit each branch is at."""

    private: bool
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, str]) -> str:
        oid = hashlib.sha1(json.dumps([len(self.commits), branch, files]).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid


@dataclass
class Fault:
    """Answer the next `times` requests of this method, whose path has `part` in it, with an error."""

    method: str
    part: str
    status: int
    times: int = 1


class Hub:
    """What the server holds; tests look into it, and put faults in its way."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        #: id of a content, as the Hub names it (SHA-1 of git, of large files SHA-256) -> content
        self.contents: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        #: ids of the data sets that it has
        self.datasets: set[str] = set()
        #: (method, path) of every request, oldest first
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path -> content of one revision."""
        repo = self.repos[repo_id]
        return {path: self.contents[oid] for path, oid in repo.commits[repo.branches.get(revision, revision)].items()}

    def seen(self, method: str, part: str) -> int:
        """How many requests of a method there were with `part` in their path."""
        return sum(m == method and part in path for m, path in self.requests)


@contextmanager
def serve() -> Iterator[Hub]:
    """A running Hub, with an empty account."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answer(Exception):
    """Ends a request with a status that is not 200."""

    def __init__(self, status: int, message: str, *, code: str | None = None, **body: Any) -> None:
        self.status, self.body = status, {"error": message, **body}
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        split = urlsplit(self.path)
        path, self.query = unquote(split.path), parse_qs(split.query)
        self.body = self._read()
        self.hub.requests.append((self.command, path))
        try:
            for fault in self.hub.faults:
                if fault.times and fault.method == self.command and fault.part in path:
                    fault.times -= 1
                    raise _Answer(fault.status, "a fault of the tests")
            for method, pattern, answer in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method.split():
                    answer(self, **match.groupdict())
                    return
            raise _Answer(404, f"no route {self.command} {path}")
        except _Answer as error:
            self._send(error.status, json.dumps(error.body).encode(), **error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, name: str, *, write: bool = False) -> Repo:
        """The repository, if the caller may see it; the Hub tells nobody else that it exists."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._is_owner()):
            raise _Answer(404 if self._is_owner() else 401, "Repository not found", code="RepoNotFound")
        if write and not self._is_owner():
            raise _Answer(403, "no write access")
        return repo

    def _commit_of(self, repo: Repo, revision: str) -> str:
        oid = repo.branches.get(revision, revision)
        if oid not in repo.commits:
            raise _Answer(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
        return oid

    def whoami(self) -> None:
        if not self._is_owner():
            raise _Answer(401, "Invalid username or password.")
        self._json({"type": "user", "name": USER, "fullname": USER, "orgs": []})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        try:
            metadata = yaml.safe_load(content.split("---")[1])
        except yaml.YAMLError as error:
            raise _Answer(400, "Invalid metadata", errors=[{"message": str(error)}], warnings=[]) from error
        if (metadata or {}).get("license", "other") not in LICENSES:
            raise _Answer(400, "Invalid metadata", errors=[{"message": '"license" must be one of ...'}], warnings=[])
        self._json({"errors": [], "warnings": []})

    def create(self) -> None:
        given = json.loads(self.body)
        if not self._is_owner():
            raise _Answer(401, "Invalid username or password.")
        owner = given.get("organization") or USER
        if owner != USER:
            raise _Answer(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        name = f"{owner}/{given['name']}"
        if name in self.hub.repos:
            raise _Answer(409, "You already created this model repo", url=f"{self.hub.url}/{name}")
        repo = Repo(private=bool(given.get("private")) or given.get("visibility") == "private")
        self.hub.contents["gitattributes"] = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        repo.commit("main", {".gitattributes": "gitattributes"})
        self.hub.repos[name] = repo
        self._json({"url": f"{self.hub.url}/{name}"})

    def branch(self, name: str, revision: str) -> None:
        repo = self._repo(name, write=True)
        if revision in repo.branches:
            raise _Answer(409, f"Reference already exists: {revision}")
        repo.branches[revision] = repo.branches["main"]
        self._json({})

    def preupload(self, name: str, revision: str) -> None:
        repo = self._repo(name, write=True)
        present = repo.commits[self._commit_of(repo, revision)]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".png")) else "regular",
                "shouldIgnore": False,
                "oid": present.get(file["path"]),
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files})

    def lfs_batch(self, name: str) -> None:
        self._repo(name, write=True)
        objects = []
        for given in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{given['oid']}", "header": {}}}
            # what is there already is not asked for again
            objects.append({**given, **({} if given["oid"] in self.hub.contents else {"actions": upload})})
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Answer(400, "the content is not what was announced")
        self.hub.contents[oid] = self.body
        self._send(200, b"")

    def lfs_get(self, oid: str) -> None:
        assert "Authorization" not in self.headers
        self._send(200, self.hub.contents[oid])

    def commit(self, name: str, revision: str) -> None:
        repo = self._repo(name, write=True)
        files = dict(repo.commits[self._commit_of(repo, revision)])
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                content = base64.b64decode(value["content"])
                oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                self.hub.contents[oid] = content
                files[value["path"]] = oid
            elif key == "lfsFile":
                if value["oid"] not in self.hub.contents:
                    raise _Answer(400, f"the content of {value['path']} was never uploaded")
                files[value["path"]] = value["oid"]
            elif key == "deletedFile" and files.pop(value["path"], None) is None:
                raise _Answer(404, "A file with this name doesn't exist", code="EntryNotFound")
        oid = repo.commit(revision, files)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self._repo(name)
        oid = self._commit_of(repo, revision)
        files = self.hub.files(name, oid)
        card = files.get("README.md", b"").decode().split("---")
        self._json(
            {
                "_id": oid,
                "id": name,
                "modelId": name,
                "sha": oid,
                "private": repo.private,
                "tags": [],
                "downloads": 0,
                "siblings": [{"rfilename": path} for path in files],
                "cardData": yaml.safe_load(card[1]) if len(card) > 2 else None,
            }
        )

    def dataset_info(self, name: str) -> None:
        if name not in self.hub.datasets:
            raise _Answer(404, "Repository not found", code="RepoNotFound")
        self._json({"_id": name, "id": name, "private": False, "tags": [], "downloads": 0, "siblings": []})

    def tree(self, name: str, revision: str, folder: str | None = None) -> None:
        repo = self._repo(name)
        prefix = f"{folder}/" if folder else ""
        entries = []
        for path, content_id in repo.commits[self._commit_of(repo, revision)].items():
            if path.startswith(prefix) and (self.query.get("recursive") != ["False"] or "/" not in path[len(prefix) :]):
                size = len(self.hub.contents[content_id])
                large = {"lfs": {"oid": content_id, "size": size, "pointerSize": 1}} if len(content_id) == 64 else {}
                entries.append({"type": "file", "path": path, "size": size, "oid": content_id[:40], **large})
        if folder and not entries:
            raise _Answer(404, f"{folder} does not exist", code="EntryNotFound")
        self._json(entries)

    def refs(self, name: str) -> None:
        branches = self._repo(name).branches.items()
        heads = [{"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid} for branch, oid in branches]
        self._json({"branches": heads, "tags": [], "converts": []})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        oid = self._commit_of(repo, revision)
        content_id = repo.commits[oid].get(path)
        if content_id is None:
            self._send(404, b"", X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=oid)
            return
        content = self.hub.contents[content_id]
        headers = {"ETag": f'"{content_id[:40]}"', "X_Repo_Commit": oid}
        if len(content_id) == 64:
            # large files lie elsewhere: on a host that the client does not take for the Hub, and sends no token to
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            headers |= {"X_Linked_Etag": f'"{content_id}"', "X_Linked_Size": str(len(content))}
            self._send(302, b"", Location=f"{elsewhere}/lfs/{content_id}", **headers)
        else:
            self._send(200, content, **headers)


_NAME = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/models/{_NAME}"
_REVISION = r"(?P<revision>.+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", rf"{_API}/branch/{_REVISION}", _Handler.branch),
    ("POST", rf"{_API}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", rf"{_API}/commit/{_REVISION}", _Handler.commit),
    ("GET", rf"/api/datasets/{_NAME}", _Handler.dataset_info),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    ("GET", rf"{_API}/refs", _Handler.refs),
    ("GET", rf"{_API}(/revision/(?P<revision>.+))?", lambda self, name, revision: self.info(name, revision or "main")),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>\w+)", _Handler.lfs_put),
    ("GET HEAD", r"/lfs/(?P<oid>\w+)", _Handler.lfs_get),
    ("GET HEAD", rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
