"""How the ranks of one node find each other and hand out file descriptors.

Every rank makes the same ``NodeGroup`` from its environment and joins it. Joining is the only step in which the
leader (local rank 0) waits for the others. After that the leader only ever sends: ``share`` and ``fail`` return at
once, and the others ``receive`` by name, in any order, whenever they get there. So it can't deadlock with the
barriers of a training framework. A leader that dies is noticed at once, one that hangs after ten minutes: whoever is
at long work beats.
The way back, ``tell`` and ``hear``, is for moments that all ranks reach together: there the leader does wait.

They meet at a socket in the abstract namespace, under a name that every rank of the run knows; it is gone with the
leader, whatever ends it. Each side believes only a peer of its own user, as the kernel knows it.

Changes that any rank makes show in shared memory: share a memfd and write into its mapping.
"""

from __future__ import annotations

import array
import hashlib
import json
import logging
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from simpletuner_gh200.config.environment import local_rank, local_size, node_identity
from simpletuner_gh200.errors import SharingError

logger = logging.getLogger("simpletuner_gh200")

JOIN_SECONDS = 600.0
"""Ranks import for a minute or more before they meet, on a busy machine several."""

PATIENCE_SECONDS = 600.0
"""A leader that gives no sign of life for so long is taken for hung."""

BEAT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LARGEST_MESSAGE = 64 * 1024

Message = tuple[dict[str, Any], list[int]]
"""A note, and the descriptors that came with it."""


class NodeGroup:
    """The ranks of one node. Collective to make and to join; afterwards see the module's description."""

    def __init__(self, local_rank: int, local_world_size: int, identity: str) -> None:
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.identity = identity
        """What tells this group from others of the same user on this machine."""
        self._peers: list[socket.socket] = []
        self._leader: socket.socket | None = None
        self._waiting: dict[str, Message] = {}
        self._last_beat = 0.0
        _groups.add(self)

    @classmethod
    def from_environment(cls, purpose: str, environment: Mapping[str, str] | None = None) -> NodeGroup:
        """As torchrun, accelerate and MPI launchers describe it; a group of one where none did.

        ``purpose`` keeps the groups of different features apart.
        """
        size = local_size(environment)
        rank = local_rank(environment) if size > 1 else 0
        text = json.dumps([purpose, size, *node_identity(environment)])
        return cls(rank, size, hashlib.sha256(text.encode()).hexdigest()[:24])

    @property
    def is_leader(self) -> bool:
        return self.local_rank == 0

    def join(self, timeout: float = JOIN_SECONDS) -> None:
        """Meet the other ranks; returns when all are there. With one rank it does nothing."""
        if self.local_world_size == 1 or self._peers or self._leader is not None:
            return
        deadline = time.monotonic() + timeout
        if self.is_leader:
            self._peers = self._gather(deadline)
        else:
            self._leader = self._reach_leader(deadline)

    def share(self, name: str, *fds: int, note: Mapping[str, object] | None = None) -> None:
        """Leader: hand descriptors, and a small JSON-able note, to every other rank under ``name``."""
        for peer in self._peers:
            _send(peer, {"name": name, "note": dict(note or {})}, fds)

    def fail(self, name: str, message: str) -> None:
        """Leader: whoever receives ``name`` is to stop with ``message``."""
        for peer in self._peers:
            _send(peer, {"name": name, "failure": message})

    def beat(self) -> None:
        """During long work: a sign of life for those who wait, leader or not. Cheap; call it often."""
        now = time.monotonic()
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            for waiting in self._peers if self._leader is None else [self._leader]:
                with suppress(BlockingIOError):  # whoever has unread beats needs no more
                    _send(waiting, {"beat": True}, flags=socket.MSG_DONTWAIT)

    def receive(self, name: str) -> Message:
        """Others: the note and the descriptors shared under ``name``; the caller owns the descriptors."""
        leader = self._joined()
        while name not in self._waiting:
            header, fds = _next_message(leader, "local rank 0", name)
            if "name" in header:
                self._waiting[header["name"]] = header, fds
        header, fds = self._waiting.pop(name)
        if "failure" in header:
            raise SharingError(f"local rank 0 could not provide {name!r}: {header['failure']}")
        return header["note"], fds

    def tell(self, name: str, *fds: int, note: Mapping[str, object] | None = None) -> None:
        """Others: hand something to the leader, who hears it from every rank."""
        _send(self._joined(), {"name": name, "note": dict(note or {})}, fds)

    def _joined(self) -> socket.socket:
        if self._leader is None:
            raise SharingError(f"local rank {self.local_rank} has not joined its node's group", remedy="call join()")
        return self._leader

    def hear(self, name: str) -> list[Message]:
        """Leader: what every other rank told under ``name``, by rank. Ranks tell in the same order everywhere."""
        heard = []
        for rank, connection in enumerate(self._peers, 1):
            header: dict[str, Any] = {"beat": True}
            while "beat" in header:
                self._beat_until_readable(connection)
                header, fds = _next_message(connection, f"local rank {rank}", name)
            if header["name"] != name:
                raise SharingError(f"local rank {rank} told {header['name']!r} where {name!r} was due")
            heard.append((header["note"], fds))
        return heard

    def meet(self, point: str) -> None:
        """All ranks: returns when every one of them has come to ``point``."""
        if self.is_leader:
            self.hear(point)
            self.share(point)
        else:
            self.tell(point)
            self.receive(point)

    def _beat_until_readable(self, connection: socket.socket) -> None:
        """Ranks that have told theirs already wait for the leader, who waits for the slowest."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end and not select.select([connection], [], [], BEAT_SECONDS)[0]:
            self.beat()

    def close(self) -> None:
        """Hang up. Descriptors and mappings that were handed out live on."""
        for connection in (*self._peers, self._leader):
            if connection is not None:
                connection.close()
        for _header, fds in self._waiting.values():
            for fd in fds:
                os.close(fd)
        self._peers, self._leader, self._waiting = [], None, {}

    # -- meeting -------------------------------------------------------------------------------------------

    @property
    def _address(self) -> str:
        return f"\0simpletuner-gh200-{os.getuid()}-{self.identity}"

    def _gather(self, deadline: float) -> list[socket.socket]:
        came: dict[int, socket.socket] = {}
        with self._listener() as listener:
            try:
                while len(came) < self.local_world_size - 1:
                    listener.settimeout(max(deadline - time.monotonic(), 0.001))
                    self._admit(listener.accept()[0], came)
            except BaseException as failed:
                for connection in came.values():
                    connection.close()
                if not isinstance(failed, TimeoutError):
                    raise
                absent = [rank for rank in range(1, self.local_world_size) if rank not in came]
                raise SharingError(
                    f"local ranks {absent} of {self.local_world_size} did not come to the meeting of this node",
                    remedy="look for their errors further up; all ranks need the same configuration",
                ) from failed
        return [came[rank] for rank in sorted(came)]

    def _listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._address)
        except OSError as taken:
            listener.close()
            raise SharingError(
                f"the meeting place {self._address[1:]} is taken by another run: {taken.strerror}",
                remedy="let the other run end, or use another MASTER_PORT",
            ) from taken
        listener.listen(64)
        return listener

    def _admit(self, connection: socket.socket, came: dict[int, socket.socket]) -> None:
        user = _peer_user(connection)
        connection.settimeout(5)
        try:
            rank = int(connection.recv(64)) if user == os.getuid() else -1
        except (TimeoutError, ValueError):
            rank = -1
        if not 0 < rank < self.local_world_size or rank in came:
            logger.warning("gh200: refused a connection of user %s as local rank %s", user, rank)
            connection.close()
            return
        connection.settimeout(None)
        came[rank] = connection

    def _reach_leader(self, deadline: float) -> socket.socket:
        while (connection := _call(self._address)) is None:
            if time.monotonic() >= deadline:
                raise SharingError(
                    f"local rank {self.local_rank} did not find local rank 0 of its node",
                    remedy="look for the error of rank 0 further up; all ranks need the same configuration, and one "
                    "network namespace",
                )
            time.sleep(_POLL_SECONDS)
        connection.send(str(self.local_rank).encode())
        return connection


def _call(address: str) -> socket.socket | None:
    """A connection to whoever of this user listens there; None where nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(1)  # a stranger's full queue must not hold us up
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    if _peer_user(connection) != os.getuid():
        connection.close()
        return None
    connection.settimeout(None)
    return connection


def _send(connection: socket.socket, header: Mapping[str, Any], fds: tuple[int, ...] = (), flags: int = 0) -> None:
    """A rank that is gone ends the run by itself; the launcher reports it with the better message."""
    message = json.dumps(header).encode()
    if len(message) > _LARGEST_MESSAGE:
        raise SharingError(f"a note of {len(message)} bytes is too long to share; put it into a memfd")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        connection.sendmsg([message], rights, flags)
    except (BrokenPipeError, ConnectionResetError):
        logger.debug("gh200: a rank of this node closed its connection")


def _next_message(connection: socket.socket, who: str, name: str) -> Message:
    connection.settimeout(PATIENCE_SECONDS)
    try:
        message, fds, _flags, _address = socket.recv_fds(connection, _LARGEST_MESSAGE, 64)
    except TimeoutError as silent:
        raise SharingError(
            f"{who} gave no sign of life for {PATIENCE_SECONDS:.0f} s while we wait for {name!r}"
        ) from silent
    except ConnectionResetError:
        # It left beats of ours unread, which the kernel reports before the last words that it sent.
        message, fds, _flags, _address = socket.recv_fds(connection, _LARGEST_MESSAGE, 64)
    finally:
        connection.settimeout(None)
    if not message:
        raise SharingError(f"{who} ended before it shared {name!r}", remedy="look for its error further up in the log")
    return json.loads(message), list(fds)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end, as the kernel knows them."""
    layout = struct.Struct("3i")
    pid, user, _group = layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return int(pid), int(user)


def _peer_user(connection: socket.socket) -> int:
    return peer_of(connection)[1]


_groups: weakref.WeakSet[NodeGroup] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    """A forked worker must not keep connections open: its parent's death would go unnoticed by the others."""
    for group in list(_groups):
        group.close()


os.register_at_fork(after_in_child=_hang_up_in_child)
