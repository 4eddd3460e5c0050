"""The frames' reader and writer.

A frame is a payload's length (4 bytes), a kind (a letter), a stream's number (4 bytes) and the payload; with the
argument `text` frames travel as lines of base64, marked by where they come from, for providers that carry only text and
may add lines or echo them. Kinds in capitals come from the host.
"""

import binascii
import errno
import itertools
import marshal
import os
import struct
import sys
import time

from miles.sandboxes.inside.guest.base import (
    CHUNK,
    DUMPABLE,
    SUBREAPER,
    Loop,
    below,
    encode,
    keyring,
    kill_until_none,
    prctl,
    processes,
)
from miles.sandboxes.inside.guest.streams import Command, Connection, Listener, Supervisor, Upload, regular

HEADER = struct.Struct(">IBI")
LINGER_S = 3.0


class Guest:
    """The frames' reader and writer, and the streams by number."""

    def __init__(self, text):
        self.loop, self.text, self.streams, self.lines, self.frames = Loop(), text, {}, b"", bytearray()
        self.own_streams, self.spare, self.supervisors = itertools.count(1 << 31), None, set()

    def run(self):
        keyring()
        prctl(SUBREAPER, 1)  # what a supervisor looked after, when a command has ended that
        prctl(DUMPABLE, 0)  # commands of the same user must not write into this process's pipes
        there = list(processes())
        found = [[pid, began] for pid, _, began, _, _ in there]
        stopped = [[pid, began] for pid, _, began, _, state in there if state in "tT"]
        self.tell(
            b"h", 0, pid=os.getpid(), uid=os.getuid(), python=sys.version.split()[0], processes=found, stopped=stopped
        )
        self.provide()
        self.loop.watch(0, self.read)
        self.loop.run()

    def supervisor(self):
        """One for a new command; the next is made when there is time."""
        found, self.spare = self.spare or Supervisor(), None
        self.loop.later(0.0005, self.provide)
        return found

    def adopted(self):
        """Processes that have come to this one since their supervisor was ended, and all below them."""
        own = set(self.supervisors)
        if self.spare is not None:
            own.add(self.spare.pid)
        mine = [pid for pid, parent, _, _, _ in processes() if parent == os.getpid() and pid not in own]
        return mine + [pid for one in mine for pid in below(one)]

    def provide(self):
        try:
            self.spare = self.spare or Supervisor()
        except OSError:  # no room for another process: the next command says so
            pass

    def send(self, kind, stream, payload=b""):
        data = HEADER.pack(len(payload), kind[0], stream) + payload
        data = b">" + binascii.b2a_base64(data) if self.text else data
        while data:
            data = data[os.write(1, data) :]

    def tell(self, kind, stream, **facts):
        self.send(kind, stream, encode(facts).encode())

    def fail(self, stream, error):
        name = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self.tell(b"!", stream, error=name, message=str(getattr(error, "strerror", None) or error))

    def ended(self, which):
        self.streams.pop(which.stream, None)

    def read(self):
        data = os.read(0, CHUNK)
        if not data:  # the host is gone
            kill_until_none(lambda: below(os.getpid()))
            for stream in list(self.streams.values()):
                if isinstance(stream, (Listener, Connection)):
                    stream.kill()
            os.close(1)
            time.sleep(LINGER_S)  # whoever looks whether a command has ended this process finds it
            os._exit(0)
        if self.text:
            *lines, self.lines = (self.lines + data).split(b"\n")
            data = b"".join(binascii.a2b_base64(line[1:]) for line in lines if line.startswith(b"<"))
        self.frames += data
        while len(self.frames) >= HEADER.size:
            size, kind, stream = HEADER.unpack_from(self.frames)
            if len(self.frames) < HEADER.size + size:
                return
            payload = bytes(self.frames[HEADER.size : HEADER.size + size])
            del self.frames[: HEADER.size + size]
            self.take(chr(kind), stream, payload)

    def take(self, kind, stream, payload):
        if kind in "RLCGPQ":
            try:
                self.open(kind, stream, marshal.loads(payload))
            except Exception as error:  # told, never raised: the other streams go on
                self.fail(stream, error)
            return
        known = self.streams.get(stream)
        if known is None:
            if kind == "I":  # its stream is over
                self.send(b"a", stream, struct.pack(">I", len(payload)))
            return
        if kind == "I":
            known.input.feed(payload)
        elif kind == "E":
            known.input.end()
            if isinstance(known, Connection):
                known.close_if_over()
        elif kind == "A":
            known.acknowledge(struct.unpack(">I", payload)[0])
        elif kind == "K":
            known.kill(marshal.loads(payload)["signal"])

    def open(self, kind, stream, ask):
        if kind == "R":
            self.streams[stream] = Command(self, stream, ask)
        elif kind == "L":
            self.streams[stream] = Listener(self, stream, ask)
        elif kind == "C":
            import socket

            connected = socket.create_connection(("127.0.0.1", ask["port"]), 1)
            self.streams[stream] = Connection(self, stream, connected)
            self.tell(b"s", stream)
        elif kind == "P":
            self.streams[stream] = Upload(self, stream, ask)
        elif kind == "G":
            self.download(stream, ask)
        else:
            self.silence(stream, ask)

    def download(self, stream, ask):
        with regular(ask["path"], os.O_RDONLY, "rb") as file:
            data = file.read(ask["most"] + 1)
        if len(data) > ask["most"]:
            raise ValueError("larger than %d bytes" % ask["most"])
        for at in range(0, len(data), CHUNK):
            self.send(b"d", stream, data[at : at + CHUNK])
        self.tell(b"x", stream)

    def silence(self, stream, ask):
        """End every process but this one, those that were there before any command, and the init's session: no command
        can become part of that, and what the init starts anew need not be ended again and again."""
        spared = {(pid, began) for pid, began in ask["spare"]}

        def found():
            there = list(processes())
            first = [session for pid, _, _, session, _ in there if pid == 1]
            parents = {pid: parent for pid, parent, _, _, _ in there}
            own = [os.getpid()]  # and what this process was started by
            while own[-1] in parents:
                own.append(parents[own[-1]])
            return [
                pid
                for pid, _, began, session, _ in there
                if pid != 1 and pid not in own and session not in first and (pid, began) not in spared
            ]

        kill_until_none(found, 100)
        self.tell(b"x", stream)


if __name__ == "__main__":
    Guest("text" in sys.argv[1:]).run()
