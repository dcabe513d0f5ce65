"""Messages between the ranks of a world on one machine.

Each two ranks share a Unix socket, over which go the messages of all their groups. A message of more than ``INLINE``
bytes is written into memory of its own, and its receivers are sent the descriptor. That memory has no name and is in no
folder: nothing stays when a rank is killed, and it does not matter how small a container's /dev/shm is. It is written
by a system call, so memory or a disk that is full is an OSError, where a mapping would be a bus error.
"""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

INLINE = 1 << 16  # a socket takes some 200 kB before its sender has to wait
HEADER = struct.Struct("<QqqII")  # group, tag, number, bytes that say what is called, whether a descriptor is sent
ALIGNED = 16  # where the content begins
FILL = [bytes(n) for n in range(ALIGNED)]
COLLECTIVE, LEFT = -1, -2  # in place of a tag; the second message says why its sender sends no more in the group
EVERY = -1  # group
LONGEST = 3600.0  # seconds of one poll
PAUSE = 0.0005  # seconds of a thread while another reads


class Lost(RuntimeError):
    """A rank died, left the group, or did not come in time."""


Key = tuple[int, int, int, int]  # a message's: its sender, of the world, its group, its tag, and the how manieth
Message = tuple[bytes, Any]  # what its sender calls, and the content


class Wire:
    """What the ranks of a world send each other. Any thread may send and take."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank = rank
        self._inbox: dict[Key, Message] = {}
        self._left: dict[tuple[int, int], str] = {}  # by rank and group, why it sends no more
        self._reading = threading.Lock()
        self._buffer, self._poll = bytearray(2 * INLINE), select.poll()
        self._sockets = self._connected(store, world_size, timeout.total_seconds())
        self._ranks = {each.fileno(): peer for peer, each in self._sockets.items()}
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)

    def _connected(self, store: dist.Store, world_size: int, seconds: float) -> dict[int, socket.socket]:
        """A socket for each other rank: connected to lower ones, accepted from higher ones."""
        found = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # to a name that is free, and in no folder
            listener.listen(world_size)
            listener.settimeout(seconds)
            store.set(f"socket of {self._rank}", listener.getsockname())
            for peer in range(self._rank):
                found[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                found[peer].connect(store.get(f"socket of {peer}"))
                found[peer].send(str(self._rank).encode())
            for _ in range(self._rank + 1, world_size):
                accepted, _ = listener.accept()
                found[int(accepted.recv(16))] = accepted
        return found

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()
        self._sockets = {}

    def send(self, peers: Iterable[int], group: int, tag: int, number: int, said: bytes, content: np.ndarray) -> None:
        """To each of ``peers`` the same; who is gone is left out. Raises OSError if there is no memory for it."""
        apart = content.nbytes > INLINE
        header = HEADER.pack(group, tag, number, len(said), apart) + said
        if not apart:
            message = [header, FILL[-len(header) % ALIGNED], content]
            for peer in peers:
                self._send(peer, message)
            return
        descriptor = memory_of(content)
        try:
            for peer in peers:
                self._send(peer, [header], (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])))
        finally:
            os.close(descriptor)

    def _send(self, peer: int, message: list[Any], *control: Any) -> None:
        while peer in self._sockets:
            try:
                self._sockets[peer].sendmsg(message, control, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:  # the peer has not read for long; it may be sending as well, and wait for this rank
                self._read((), 0.01)
            except (BrokenPipeError, ConnectionResetError):
                return

    def take(self, wanted: Sequence[Key], seconds: float) -> list[Message]:
        """These messages, each once. Raises Lost."""
        end = time.monotonic() + seconds
        while missing := [key for key in wanted if key not in self._inbox]:
            for key in missing:
                reason = self._left.get(key[:2]) or self._left.get((key[0], EVERY))
                if reason and key not in self._inbox:  # where another thread may have put it
                    raise Lost(f"rank {key[0]} {reason}")
            if (rest := end - time.monotonic()) <= 0:
                ranks = " and ".join(str(sender) for sender, *_ in missing)
                raise Lost(f"Timed out waiting {seconds:g} s for rank {ranks}")
            self._read(missing, min(rest, LONGEST))
        return [self._inbox.pop(key) for key in wanted]

    def _read(self, missing: Sequence[Key], seconds: float) -> None:
        """Take in what there is; wait for it if there is nothing, nor any of what is ``missing``."""
        if not self._reading.acquire(blocking=False):  # another thread reads, for all
            time.sleep(PAUSE)
            return
        try:
            if not any(key in self._inbox for key in missing):
                for descriptor, _ in self._poll.poll(seconds * 1e3):
                    self._receive(self._ranks[descriptor])
        finally:
            self._reading.release()

    def _receive(self, peer: int) -> None:
        try:
            size, control, *_ = self._sockets[peer].recvmsg_into([self._buffer], socket.CMSG_SPACE(4))
        except ConnectionResetError:  # the peer died with messages unread; its own come after this error
            return
        if not size:
            self._poll.unregister(self._sockets[peer])
            self._left[peer, EVERY] = "is gone: connection closed by peer"
            return
        group, tag, number, length, apart = HEADER.unpack_from(self._buffer)
        begin = HEADER.size + length
        said, content = bytes(self._buffer[HEADER.size : begin]), self._buffer[begin + -begin % ALIGNED : size]
        if tag == LEFT:
            self._left[peer, group] = said.decode()
            return
        if apart:
            (descriptor,) = array.array("i", control[0][2])
            content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            os.close(descriptor)
        self._inbox[peer, group, tag, number] = said, content


def memory_of(content: np.ndarray) -> int:
    """A descriptor of memory that holds it, or of a file without a name where there is no such memory."""
    try:
        descriptor = os.memfd_create("message")
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
