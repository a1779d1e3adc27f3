"""The git checkout of SimpleTuner, through the git client. Only what the workflow needs, by intention."""

from __future__ import annotations

import time
from pathlib import Path

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.upstream.git import git, resolve

LOCK_PATIENCE = 10.0
"""Seconds to wait for a git process that outlived the one that started it."""
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

    def path(self, name: str) -> Path:
        """A file of git's own, wherever this work tree keeps them."""
        return (self.root / self.git("rev-parse", "--git-path", name)).resolve()

    @property
    def state_folder(self) -> Path:
        return self.path("gh200-rebase")

    def head(self) -> str:
        return resolve(self.root, "HEAD")

    def branch(self) -> str | None:
        done = git(self.root, "symbolic-ref", "--quiet", "--short", "HEAD", check=False)
        return done.stdout.decode().strip() or None

    def has_branch(self, name: str) -> bool:
        return git(self.root, "show-ref", "--verify", "--quiet", f"refs/heads/{name}", check=False).returncode == 0

    def has_remote(self, name: str) -> bool:
        return name in self.git("remote").splitlines()

    def uncommitted(self) -> list[str]:
        """Files git knows whose changes are not committed."""
        return _names(git(self.root, "diff", "--name-only", "-z", "HEAD").stdout)

    def tracked(self) -> set[str]:
        return set(_names(git(self.root, "ls-files", "-z").stdout))

    def untracked(self) -> list[str]:
        return _names(git(self.root, "ls-files", "--others", "--exclude-standard", "-z").stdout)

    def require_ready(self) -> None:
        """Nothing half-done, and somebody to commit as."""
        for name in UNDER_WAY:
            if self.path(name).exists():
                raise UsageError(
                    f"{self.root}: git is in the middle of something ({name})", remedy="finish or abort it"
                )
        if git(self.root, "var", "GIT_COMMITTER_IDENT", check=False).returncode != 0:
            raise UsageError("git does not know who you are", remedy="set user.name and user.email with git config")

    def require_room(self, commit: str, ours: tuple[str, ...]) -> None:
        """Files git does not know stay where they are, unless the commit or what we write has one of that name."""
        there = set(_names(git(self.root, "ls-tree", "-r", "--name-only", "-z", commit).stdout))
        inside = tuple(f"{name}/" for name in ours)
        taken = [name for name in self.untracked() if name in there or name in ours or name.startswith(inside)]
        if taken:
            shown = ", ".join(taken[:5]) + (" ..." if len(taken) > 5 else "")
            raise UsageError(
                f"{self.root} has files that git does not know where the new branch has its own: {shown}",
                remedy="commit them or move them away",
            )

    def ignore_ours(self, names: tuple[str, ...]) -> None:
        """Our working files are no changes of the user's; said in this clone only, not in .gitignore."""
        path = self.path("info/exclude")
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="utf-8") if path.exists() else ""
        missing = [f"/{name}" for name in names if f"/{name}" not in known.splitlines()]
        if missing:
            path.write_text("\n".join([known.rstrip("\n"), *missing]).lstrip("\n") + "\n", encoding="utf-8")

    def fetch(self, remote: str) -> None:
        git(self.root, "fetch", "--tags", "--", remote)

    def create_branch(self, name: str, commit: str) -> None:
        if not self.has_branch(name):
            git(self.root, "branch", "--no-track", name, commit)

    def switch(self, branch: str) -> None:
        """To the branch, discarding what an interrupted switch left half-done; that is kept as a patch first."""
        self.wait_for_lock()
        self.keep_uncommitted()
        git(self.root, *QUIET, "switch", "--quiet", "--discard-changes", branch)

    def switch_to(self, branch: str | None, commit: str) -> None:
        if branch is not None:
            self.switch(branch)
        else:
            self.keep_uncommitted()
            git(self.root, *QUIET, "switch", "--quiet", "--discard-changes", "--detach", commit)

    def drop_untracked(self, paths: tuple[str, ...]) -> None:
        """Remove files git does not know below these paths, which are ours to write."""
        self.wait_for_lock()
        git(self.root, "clean", "--quiet", "--force", "-d", "-x", "--", *paths)

    def has_file(self, commit: str, path: str) -> bool:
        return git(self.root, "cat-file", "-e", f"{commit}:{path}", check=False).returncode == 0

    def uncommitted_patch(self) -> bytes:
        return git(self.root, "diff", "--binary", "HEAD").stdout

    def apply(self, patch: Path) -> bool:
        """Put a patch's changes into the work tree: all of them, or none and False."""
        return git(self.root, "apply", str(patch), check=False).returncode == 0

    def keep_uncommitted(self) -> Path | None:
        patch = self.uncommitted_patch()
        if not patch:
            return None
        self.state_folder.mkdir(parents=True, exist_ok=True)
        path = self.state_folder / f"uncommitted-{time.time_ns()}.patch"
        path.write_bytes(patch)
        return path

    def commit(self, message: str, paths: list[str]) -> str | None:
        """Commit just these paths; None if they are as committed already."""
        self.wait_for_lock()
        git(self.root, "add", "--force", "--", *paths)
        if git(self.root, "diff", "--cached", "--quiet", "--", *paths, check=False).returncode == 0:
            return None
        git(self.root, *QUIET, "commit", "--quiet", "--message", message, "--", *paths)
        return self.head()

    def wait_for_lock(self) -> None:
        lock, until = self.path("index.lock"), time.monotonic() + LOCK_PATIENCE
        while lock.exists():
            if time.monotonic() > until:
                raise UsageError(f"{lock} is in the way", remedy="if no other git command is running, delete it")
            time.sleep(0.1)


def _names(listing: bytes) -> list[str]:
    return [name for name in listing.decode(errors="surrogateescape").split("\0") if name]
