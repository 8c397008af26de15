# SPDX-License-Identifier: Apache-2.0
"""How ranks meet on a CPU: each leaves a note in the job's store that says what it calls, with the data.

MindSpore's own collectives on a CPU (mccl) lack a kernel for most calls and dtypes, take 12 ms between two ranks and 40
between four, return garbage on one rank when shapes differ, and wait 30 s for a rank that has died, after which the
process is of no use. A meeting takes one to three milliseconds, serves every dtype, compares the calls before anything
is done with the data, says who has not come, and leaves the process as good as before. Data that is large for a note is
left in memory that ranks of the same host can read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindspore.communication import GlobalComm

from hyper_parallel.platform.agreement import Call, agree, check_agreement
from hyper_parallel.platform.axes import axis_of
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.errors import CommunicationError, unfinished
from hyper_parallel.platform.mindspore.store import Membership, Store
from hyper_parallel.platform.order import parted

# More bytes than these stay in this process's memory, where the others read them if they are on the same host.
LARGE = 1 << 16

# How long a failed rank waits for the others to say what they are waiting in.
NOTE_SECONDS = 1.0

# Seconds between two looks at the store: few while the others may come at once, more after that.
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 5e-3

# How long a rank that hosts the store stays for ranks of other hosts, of which it does not know whether they live.
STAY_SECONDS = 60.0

# Seconds in which the store may send its last answer.
LAST_ANSWER_SECONDS = 0.05

# How often a rank that waits looks whether those it waits for have left the job.
LEFT_SECONDS = 0.1


class Group(str):  # noqa: SLOT000 - it has attributes beside its name
    """A group by its name, as MindSpore's own functions take it, with what its ranks need to meet."""

    ranks: tuple[int, ...]
    key: str
    timeout: float
    lives: bool
    issued: int
    progress: Progress
    sent: Counter[tuple[int, Any]]
    received: Counter[tuple[int, Any]]
    released: Counter[str]
    _rank: int

    def __new__(
        cls, name: str, ranks: Sequence[int], rank: int, key: str, timeout: float
    ) -> Group:
        """``key``: a name that no other group in the same store has, and that all members give it."""
        group = super().__new__(cls, name)
        group.ranks = tuple(ranks)
        group._rank = group.ranks.index(rank)
        group.key, group.timeout, group.lives = key, timeout, True
        group.issued = 0  # collectives, on this rank
        group.progress = Progress()
        group.sent, group.received = Counter(), Counter()  # letters, by peer and tag
        group.released = Counter()  # those whose data nobody needs any more
        return group

    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def __reduce__(self) -> Any:
        raise coded(
            TypeError,
            "HP104",
            f"group {str(self)!r} belongs to this process and cannot be pickled",
        )


class Progress:
    """The collectives of a group by number: which are under way, and which notes are gone."""

    def __init__(self) -> None:
        self.finished = 0  # all before this one are over on this rank
        self.cleaned = 0  # the notes of all before this one have been removed
        self._begun = 0
        self._open: set[int] = set()
        self._lock = threading.Lock()  # two threads may communicate in one group

    def begin(self) -> int:
        """The number of one more."""
        with self._lock:
            number = self._begun
            self._begun += 1
            self._open.add(number)
        return number

    def end(self, number: int) -> None:
        """That one is over."""
        with self._lock:
            self._open.discard(number)
            self.finished = min(self._open, default=self._begun)

    def clean(self, finished: int) -> range:
        """Those that are over on all ranks and whose notes are to be removed now."""
        with self._lock:
            numbers = range(self.cleaned, max(self.cleaned, finished))
            self.cleaned = numbers.stop
        return numbers


class Message(NamedTuple):
    """Data in the memory of another process of this host."""

    address: str
    start: int
    size: int

    def read(self) -> bytes:
        """The data."""
        with Path(self.address).open("rb") as memory:
            memory.seek(self.start)
            return memory.read(self.size)


class Mailbox:
    """Memory of this process with data for the others, as long as this object lives."""

    def put(self, pieces: Sequence[bytes]) -> list[bytes | Message]:
        """The pieces as others can read them; the same object is there once."""
        descriptor = os.memfd_create("hyper_parallel", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        address = f"/proc/{os.getpid()}/fd/{descriptor}"
        places: dict[int, Message] = {}
        with open(descriptor, "wb", closefd=False) as memory:
            for piece in pieces:
                if id(piece) not in places:
                    places[id(piece)] = Message(address, memory.tell(), len(piece))
                    memory.write(piece)
        return [places[id(piece)] for piece in pieces]


class Note(NamedTuple):
    """What a rank leaves for the others of a group: its call, data for each, and which collectives it is done with."""

    call: Call
    pieces: list[bytes | Message]
    finished: int


class Letter(NamedTuple):
    """What a rank leaves for one other."""

    facts: tuple[Any, ...]
    piece: bytes | Message


class Job:
    """The ranks that have joined, and the store in which they meet."""

    def __init__(self, rank: int, size: int, store: Store, timeout: float) -> None:
        self.rank, self.size, self.store, self.timeout = rank, size, store, timeout
        self.world = range(size)
        self.left = Membership(store, "left", self.world)
        self.gone = Membership(
            store, "gone", self.world
        )  # those that do not use the store any more
        self.one_host = False  # until the ranks have told each other
        self.waiting: dict[
            int, tuple[str, float]
        ] = {}  # thread -> what it waits in, and since when
        self._processes: dict[int, int] = {}  # of ranks of the same host
        self._mailboxes: dict[str, tuple[Mailbox, Callable[[], set[int]]]] = {}

    def meet_hosts(self) -> None:
        """Finds out, when all have come, whether the ranks can read each other's memory."""
        members = Membership(self.store, "hosts", self.world)
        self.store.set(f"host{self.rank}", f"{host_name()}\n{os.getpid()}")
        members.sign(self.rank)
        if self.wait_for(self.world, members.signed):
            return
        told = [
            self.store.get(f"host{rank}").decode().rpartition("\n")
            for rank in self.world
        ]
        self.one_host = len({host for host, _, _ in told}) == 1
        if self.one_host:
            self._processes = {
                rank: int(process) for rank, (_, _, process) in enumerate(told)
            }

    def packed(
        self, pieces: Sequence[bytes], key: str, readers: Callable[[], set[int]]
    ) -> list[bytes | Message]:
        """The pieces as a note can hold them. ``readers``: those that have yet to read the note of that key."""
        size = sum({id(piece): len(piece) for piece in pieces}.values())
        if size <= LARGE or not self.one_host:
            return list(pieces)
        mailbox = Mailbox()
        self._mailboxes[key] = mailbox, readers
        return mailbox.put(pieces)

    def release(self, key: str) -> bool:
        """Lets go of the data for a note that has been read; whether there was any."""
        return self._mailboxes.pop(key, None) is not None

    def wait_for(
        self,
        wanted: Collection[int],
        signed: Callable[[], set[int]],
        timeout: float | None = None,
        what: str = "",
    ) -> set[int]:
        """Waits until these ranks have signed; returns those that have not in time, or will not because they left.

        ``what``: the collective that is waited in.
        """
        thread = threading.get_ident()
        self.waiting[thread] = what, time.monotonic()
        try:
            return self._wait_for(wanted, signed, timeout or self.timeout)
        finally:
            self.waiting.pop(thread, None)

    def _wait_for(
        self, wanted: Collection[int], signed: Callable[[], set[int]], timeout: float
    ) -> set[int]:
        now = time.monotonic()
        deadline, look, pause = now + timeout, now + LEFT_SECONDS, SHORTEST_PAUSE
        while missing := set(wanted) - signed():
            now = time.monotonic()
            if now > look:
                look = now + LEFT_SECONDS
                if missing & self.left.signed() and (missing := set(wanted) - signed()):
                    return missing
            if now > deadline:
                return missing
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        return set()

    def leave(self) -> None:
        """Lets the others know that this rank will not come any more, and its data be read by those that have."""
        with contextlib.suppress(
            RuntimeError
        ):  # the store may have ended with the rank that had it
            self.left.sign(self.rank)
            deadline = time.monotonic() + self.timeout
            for _, readers in self._mailboxes.values():
                while (
                    self._living(readers() - self.left.signed())
                    and time.monotonic() < deadline
                ):
                    time.sleep(LONGEST_PAUSE)
            self.gone.sign(self.rank)
        self._mailboxes.clear()

    def host_until_all_are_gone(self) -> None:
        """Keeps the store of this process up for those that still read: a rank waits for ever where it ends before."""
        deadline = time.monotonic() + (
            self.timeout if self.one_host else min(self.timeout, STAY_SECONDS)
        )
        with contextlib.suppress(RuntimeError):
            while (
                self._living(set(self.world) - {self.rank} - self.gone.signed())
                and time.monotonic() < deadline
            ):
                time.sleep(LONGEST_PAUSE)
        time.sleep(LAST_ANSWER_SECONDS)

    def _living(self, ranks: set[int]) -> set[int]:
        """Those whose processes still run, as far as this host can tell."""
        return {
            rank
            for rank in ranks
            if rank not in self._processes or is_running(self._processes[rank])
        }

    def explain(
        self,
        call: str,
        ranks: Sequence[int],
        missing: Iterable[int],
        key: str,
        group: Group | None,
        number: int = 0,
    ) -> CommunicationError:
        """The error of a rank that waited in vain, after it has heard what the others wait in."""
        store = self.store.under(f"fault/{key}")
        members = Membership(store, "roll", self.world)
        store.set(str(self.rank), call)
        members.sign(self.rank)
        self.wait_for(ranks, members.signed, NOTE_SECONDS)
        elsewhere = {
            r: store.get(str(r)).decode() for r in sorted(members.signed() & set(ranks))
        }
        never = tuple(r for r in ranks if r in set(missing) and r not in elsewhere)
        axis = axis_of(ranks if group is None else group.ranks)
        return unfinished(
            self.rank,
            call,
            group and str(group),
            ranks,
            never,
            elsewhere,
            number=number,
            axis=axis,
        )


class Meeting:
    """One collective under way: this rank's note is in the store, those of the others are waited for."""

    def __init__(
        self,
        job: Job,
        group: Group,
        call: Call,
        pieces: Sequence[bytes],
        *,
        in_order: bool,
    ) -> None:
        """``in_order``: whether ranks that issue different collectives are told each other's lines of code."""
        self._job, self._group, self._call, self._in_order = job, group, call, in_order
        self._number = group.progress.begin()
        self._store = job.store.under(group.key)
        self._members = Membership(self._store, f"{self._number}", group.ranks)
        self._read = self._readers(self._number)
        packed = job.packed(
            pieces,
            self._mailbox_key(self._number),
            lambda: set(group.ranks) - self._read.signed(),
        )
        note = Note(call, packed, group.progress.finished)
        self._store.set(self._key(group.rank(), self._number), pickle.dumps(note))
        self._members.sign(job.rank)

    def is_full(self) -> bool:
        """Whether all have come."""
        return len(self._members.signed()) == self._group.size()

    def pieces(self) -> list[bytes]:
        """What each rank has for this one, when all have come; an error that says who has not, or what does not fit."""
        job, group, call = self._job, self._group, self._call.name
        try:
            missing = job.wait_for(
                group.ranks, self._members.signed, group.timeout, call
            )
            if missing:
                raise job.explain(
                    call, group.ranks, missing, group.key, group, self._number + 1
                )
            notes: list[Note] = [
                pickle.loads(self._store.get(self._key(i, self._number)))  # noqa: S301 - from a rank of our own job
                for i in range(group.size())
            ]
            found = [_unpacked(note.pieces[group.rank()]) for note in notes]
            if any(
                isinstance(piece, Message) for note in notes for piece in note.pieces
            ):
                self._read.sign(job.rank)
        except CommunicationError:
            raise
        except (RuntimeError, OSError) as error:  # the store or a process has ended
            number, axis = self._number + 1, axis_of(group.ranks)
            told = unfinished(
                job.rank,
                call,
                str(group),
                group.ranks,
                None,
                {},
                error,
                number=number,
                axis=axis,
            )
            raise told from error
        self._clean(notes)
        self._check([note.call for note in notes])
        return found

    def _check(self, calls: Sequence[Call]) -> None:
        ranks = self._group.ranks
        if self._in_order and not agree(calls):
            raise parted(
                self._job.rank,
                self._number + 1,
                ranks,
                dict(zip(ranks, map(issued, calls), strict=True)),
            )
        check_agreement(calls, ranks, self._call.name)

    def _clean(self, notes: Sequence[Note]) -> None:
        """Removes this rank's notes that all have read."""
        progress = self._group.progress
        progress.end(self._number)
        for number in progress.clean(min(note.finished for note in notes)):
            self._store.delete_key(self._key(self._group.rank(), number))
            if self._job.release(self._mailbox_key(number)):
                self._readers(number).delete()
            if self._group.rank() == 0:
                Membership(self._store, f"{number}", self._group.ranks).delete()

    def _readers(self, number: int) -> Membership:
        return Membership(self._store, f"{number}/read", self._group.ranks)

    def _mailbox_key(self, number: int) -> str:
        return f"{self._group.key}/{number}"

    def _key(self, member: int, number: int) -> str:
        return f"{number}/note{member}"


class Post:
    """Letters from rank to rank within a group, in order for each tag."""

    def __init__(self, job: Job, group: Group) -> None:
        self._job, self._group = job, group
        self._store = job.store.under(group.key)

    def send(self, peer: int, tag: Any, facts: tuple[Any, ...], data: bytes) -> None:
        """Leaves a letter for a rank."""
        key, number = self._key(self._job.rank, peer, tag), self._group.sent[peer, tag]
        opened = f"{key}/opened"
        [piece] = self._job.packed(
            [data],
            f"{key}/{number}",
            lambda: set() if self._store.add(opened, 0) > number else {peer},
        )
        if isinstance(piece, Message):
            for old in range(self._group.released[key], self._store.add(opened, 0)):
                self._job.release(f"{key}/{old}")
                self._group.released[key] = old + 1
        self._store.set(f"{key}/{number}", pickle.dumps(Letter(facts, piece)))
        self._group.sent[peer, tag] += 1
        self._store.add(key, 1)  # now it can be seen

    def has_letter(self, peer: int, tag: Any, number: int) -> bool:
        """Whether a rank has left a letter of that number."""
        return self._store.add(self._key(peer, self._job.rank, tag), 0) > number

    def await_letter(
        self, call: str, peer: int | None, tag: Any, number: int | None
    ) -> tuple[int, tuple[Any, ...], bytes]:
        """(sender, facts, data): the letter of that number, or the next one of whoever has left one."""
        job, group = self._job, self._group
        ranks = group.ranks if peer is None else sorted([job.rank, peer])
        try:
            return self._await_letter(call, peer, tag, number, ranks)
        except CommunicationError:
            raise
        except (RuntimeError, OSError) as error:  # the store or a process has ended
            raise unfinished(
                job.rank, call, str(group), ranks, None, {}, error
            ) from error

    def _await_letter(
        self,
        call: str,
        peer: int | None,
        tag: Any,
        number: int | None,
        ranks: Sequence[int],
    ) -> tuple[int, tuple[Any, ...], bytes]:
        job, group = self._job, self._group
        peers = [r for r in group.ranks if r != job.rank] if peer is None else [peer]

        def senders() -> set[int]:
            return {
                r
                for r in peers
                if self.has_letter(
                    r, tag, group.received[r, tag] if number is None else number
                )
            }

        if number is None:
            nobody = job.wait_for(
                [job.rank],
                lambda: {job.rank} if senders() else set(),
                group.timeout,
                call,
            )
            missing = set(peers) if nobody else set()
        else:
            missing = job.wait_for(peers, senders, group.timeout, call)
        if missing:
            raise job.explain(call, ranks, missing, group.key, group)
        sender = min(senders())
        key = self._key(sender, job.rank, tag)
        place = f"{key}/{self.claim(sender, tag) if number is None else number}"
        letter: Letter = pickle.loads(self._store.get(place))  # noqa: S301 - from a rank of our own job
        data = _unpacked(letter.piece)
        self._store.delete_key(place)
        self._store.add(f"{key}/opened", 1)
        return sender, letter.facts, data

    def claim(self, peer: int, tag: Any) -> int:
        """The number of the next letter from a rank: no one else in this process will open it."""
        number = self._group.received[peer, tag]
        self._group.received[peer, tag] += 1
        return number

    def _key(self, sender: int, receiver: int, tag: Any) -> str:
        return f"letters/{sender}/{receiver}/{tag}"


def issued(call: Call) -> str:
    """What a rank issued, and where."""
    return f"{call} at {call.line or 'a line of the framework'}"


def _unpacked(piece: bytes | Message) -> bytes:
    return piece.read() if isinstance(piece, Message) else piece


def is_running(process: int) -> bool:
    """Whether a process of this host has not ended yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def host_name() -> str:
    """The same for processes of one host that see each other's memory, different for others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.exists() or not hasattr(os, "memfd_create"):
        return (
            f"no memory to share with process {os.getpid()} of {socket.gethostname()}"
        )
    return f"{boot.read_text().strip()} {namespace.readlink()} {os.getuid()}"


def world_name() -> str:
    """What MindSpore calls the group of all ranks, if it knows of it."""
    return str(GlobalComm.WORLD_COMM_GROUP) if GlobalComm.INITED else "world"
