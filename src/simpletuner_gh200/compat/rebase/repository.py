"""The git checkout of SimpleTuner, through the git client. Only what the workflow needs, by intention."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.source import git, resolve

UNDER_WAY = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply", "BISECT_LOG")
# A hook or a signing prompt of the user's must not change or stop what we commit.
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgsign=false", "-c", "advice.detachedHead=false")


class Repository:
    """A work tree with SimpleTuner in it."""

    def __init__(self, folder: Path) -> None:
        done = git(folder, "rev-parse", "--show-toplevel", check=False) if folder.is_dir() else None
        if done is None or done.returncode != 0:
            raise UsageError(f"{folder} is not a git checkout", remedy="give the folder of a git clone of SimpleTuner")
        self.root = Path(done.stdout.decode().strip())

    def git(self, *arguments: str) -> str:
        return git(self.root, *arguments).stdout.decode(errors="replace").strip()

    def succeeds(self, *arguments: str) -> bool:
        return git(self.root, *arguments, check=False).returncode == 0

    def names(self, *arguments: str) -> list[str]:
        """Paths, of a command that separates them by zeros."""
        listing = git(self.root, *arguments).stdout.decode(errors="surrogateescape")
        return [name for name in listing.split("\0") if name]

    def text(self, commit: str, path: str) -> bytes:
        """Of a file in a commit; empty where it has none."""
        return git(self.root, "cat-file", "blob", f"{commit}:{path}", check=False).stdout

    def path(self, name: str) -> Path:
        """A file of git's own, wherever this work tree keeps them."""
        return (self.root / self.git("rev-parse", "--git-path", name)).resolve()

    @property
    def state_folder(self) -> Path:
        return self.path("gh200-rebase")

    def head(self) -> str:
        return resolve(self.root, "HEAD")

    def branch(self) -> str | None:
        """None where HEAD is detached."""
        return self.git("branch", "--show-current") or None

    def ancestor(self, one: str, other: str) -> str:
        """The commit that two have in common; empty where there is none."""
        return git(self.root, "merge-base", one, other, check=False).stdout.decode().strip()

    def has_branch(self, name: str) -> bool:
        return self.succeeds("show-ref", "--verify", "--quiet", f"refs/heads/{name}")

    def uncommitted(self) -> list[str]:
        """Files git knows whose changes are not committed."""
        return self.names("diff", "--name-only", "-z", "HEAD")

    def uncommitted_patch(self) -> bytes:
        return git(self.root, "diff", "--binary", "HEAD").stdout

    def require_ready(self) -> None:
        """Nothing half-done, and somebody to commit as."""
        for name in UNDER_WAY:
            if self.path(name).exists():
                raise UsageError(
                    f"{self.root}: git is in the middle of something ({name})", remedy="finish or abort it"
                )
        if not self.succeeds("var", "GIT_COMMITTER_IDENT"):
            raise UsageError("git does not know who you are", remedy="set user.name and user.email with git config")

    def require_room(self, commit: str, ours: tuple[str, ...]) -> None:
        """Files git does not know stay where they are, unless the commit or what we write has one of that name."""
        there = {*ours, *self.names("ls-tree", "-r", "--name-only", "-z", commit)}
        inside = tuple(f"{name}/" for name in ours)
        untracked = self.names("ls-files", "--others", "--exclude-standard", "-z")
        taken = [name for name in untracked if name in there or name.startswith(inside)]
        if taken:
            shown = ", ".join(taken[:5]) + (" ..." if len(taken) > 5 else "")
            raise UsageError(
                f"{self.root} has files that git does not know where the new branch has its own: {shown}",
                remedy="commit them or move them away",
            )

    def ignore(self, names: tuple[str, ...]) -> None:
        """Our working files are no changes of the user's; said in this clone only, not in .gitignore."""
        path = self.path("info/exclude")
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        missing = [f"/{name}" for name in names if f"/{name}" not in known]
        if missing:
            path.write_text("".join(f"{line}\n" for line in (*known, *missing)), encoding="utf-8")

    def create_branch(self, name: str, commit: str) -> None:
        if not self.has_branch(name):
            self.git("branch", "--no-track", name, commit)

    def switch(self, branch: str | None, commit: str = "") -> None:
        """To the branch, or to the commit itself; what an interrupted switch left half-done is kept as a patch."""
        patch = self.uncommitted_patch()
        if patch:
            self.state_folder.mkdir(parents=True, exist_ok=True)
            (self.state_folder / f"uncommitted-{time.time_ns()}.patch").write_bytes(patch)
        where = [branch] if branch is not None else ["--detach", commit]
        self.git(*QUIET, "switch", "--quiet", "--discard-changes", *where)

    def commit(self, message: str, paths: list[str]) -> str | None:
        """Commit just these paths; None if they are as committed already."""
        self.git("add", "--force", "--", *paths)
        if self.succeeds("diff", "--cached", "--quiet", "--", *paths):
            return None
        self.git(*QUIET, "commit", "--quiet", "--message", message, "--", *paths)
        return self.head()


def write_whole(path: Path, content: str | bytes) -> None:
    """A reader sees the old file or the new one, also after a power cut. What begins with ``#!`` can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o755 if data.startswith(b"#!") else 0o644)
    os.replace(name, path)
