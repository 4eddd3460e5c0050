"""What a stream's number can stand for: a command, a connection, a port, a file that is written."""

import errno
import marshal
import os
import struct
import time

from miles.sandboxes.inside.guest.base import (
    CHUNK,
    DRAIN_S,
    SIGKILL,
    SIGPIPE,
    SUBREAPER,
    WINDOW,
    Kept,
    Sink,
    below,
    kill,
    kill_until_none,
    oom_kills,
    prctl,
    user_changer,
)


class Supervisor:
    """A process that will start one command and adopt its orphans, so that all it started can be found and ended.

    It is made before it is needed: a fork of Python costs more than most commands.
    """

    def __init__(self):
        ends = []
        try:
            for _ in range(5):
                ends.append(os.pipe())
            self.pid = os.fork()
        except OSError:
            for fd in (fd for pair in ends for fd in pair):
                os.close(fd)
            raise
        (asked, ask), (stdin, put), (out, stdout), (err, stderr), (told, status) = ends
        if self.pid == 0:
            try:
                supervise(asked, stdin, stdout, stderr, status)
            finally:
                os._exit(125)
        for fd in (asked, stdin, stdout, stderr, status):
            os.close(fd)
        self.ask, self.put, self.out, self.err, self.told = ask, put, out, err, told

    def start(self, ask):
        data = marshal.dumps(ask, 2)
        while data:
            data = data[os.write(self.ask, data) :]
        os.close(self.ask)

    def close(self):
        """Let go of one that has ended."""
        for fd in (self.ask, self.put, self.out, self.err, self.told):
            os.close(fd)
        os.waitpid(self.pid, 0)


def supervise(asked, stdin, stdout, stderr, status):
    """Start the command, wait for it and for every orphan of it; never returns."""
    os.setsid()
    prctl(SUBREAPER, 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (asked, stdin, stdout, stderr, status):
            try:
                os.close(int(name))
            except OSError:
                pass
    try:  # the kernel, out of memory, shall rather take this than what looks after it
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass
    with os.fdopen(asked, "rb") as file:
        data = file.read()
    if not data:
        os._exit(0)
    child = begin(marshal.loads(data), stdin, stdout, stderr)
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    if child > 0:
        os.write(status, struct.pack(">i", child << 8))
        os._exit(0)
    while True:
        try:
            pid, how = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == -child:
            os.write(status, struct.pack(">i", how))


def begin(ask, stdin, stdout, stderr):
    """The command's process; when it cannot start, the exit code that a shell would give, its reason on `stderr`."""
    environment, places = dict(os.environ, **ask.get("env", {})), ((stdin, 0), (stdout, 1), (stderr, 2))
    argv = ask["argv"]
    try:
        if ask.get("cwd"):
            os.chdir(ask["cwd"])
        change = user_changer(ask["user"], environment) if ask.get("user") else None
        if change is None and hasattr(os, "posix_spawnp"):
            try:
                moves = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in places]
                return -os.posix_spawnp(
                    argv[0], argv, environment, file_actions=moves, setsid=True, setsigdef=[SIGPIPE]
                )
            except NotImplementedError:  # an old C library
                pass
        child = os.fork()
        if child:
            return -child
    except Exception as error:
        return refuse(argv, error, stderr)
    try:
        os.setsid()
        for fd, place in places:
            os.dup2(fd, place)
        import signal

        signal.signal(SIGPIPE, signal.SIG_DFL)
        if change is not None:
            change()
        os.execvpe(argv[0], argv, environment)
    except Exception as error:
        os._exit(refuse(argv, error, 2))


def refuse(argv, error, stderr):
    """Say why a command does not start; what a shell would exit with."""
    reason = getattr(error, "strerror", None) or str(error)
    os.write(stderr, ("cannot start %s: %s\n" % (argv[0], reason)).encode("utf-8", "replace"))
    return 126 if getattr(error, "errno", None) == errno.EACCES else 127


class Command:
    """A command, from its start to its end."""

    def __init__(self, guest, stream, ask):
        self.guest, self.stream = guest, stream
        self.limit, self.began, self.ooms = ask.get("limit"), time.monotonic(), oom_kills()
        self.status, self.timed_out, self.over, self.unread = None, False, False, 0
        supervisor = guest.supervisor()
        try:
            supervisor.start(ask)
        except OSError:  # a command has ended it before
            supervisor.close()
            supervisor = Supervisor()
            supervisor.start(ask)
        self.supervisor, self.told = supervisor.pid, supervisor.told
        guest.supervisors.add(self.supervisor)
        self.input = Sink(guest, stream, supervisor.put)
        self.outputs = {supervisor.out: b"o", supervisor.err: b"e"}
        self.kept = {kind: Kept(self.limit) for kind in (b"o", b"e")} if self.limit is not None else {}
        for fd in self.outputs:
            os.set_blocking(fd, False)
            guest.loop.watch(fd, self.reader(fd))
        guest.loop.watch(self.told, self.ended)
        if ask.get("timeout"):
            guest.loop.later(ask["timeout"], self.expire)
        if self.limit is None:
            guest.tell(b"s", stream, pid=self.supervisor)

    def reader(self, fd):
        def read():
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return False
            if not data:
                self.guest.loop.watch(fd)
                os.close(fd)
                del self.outputs[fd]
                self.finish_if_read()
            elif self.over:
                pass  # the command has ended; what it left behind must not meet a closed pipe
            elif self.kept:
                self.kept[self.outputs[fd]].feed(data)
            else:
                self.guest.send(self.outputs[fd], self.stream, data)
                self.unread += len(data)
                if self.unread >= WINDOW:
                    for held in self.outputs:
                        self.guest.loop.watch(held)
            return bool(data)

        return read

    def acknowledge(self, count):
        held, self.unread = self.unread >= WINDOW, self.unread - count
        if held and self.unread < WINDOW:
            for fd in self.outputs:
                self.guest.loop.watch(fd, self.reader(fd))

    def ended(self):
        data = os.read(self.told, 4)
        if data:
            self.status = struct.unpack(">i", data)[0]
            self.guest.loop.later(DRAIN_S, self.finish)
            self.finish_if_read()
            return
        self.guest.loop.watch(self.told)  # the supervisor has ended: nothing of the command is left
        os.close(self.told)
        os.waitpid(self.supervisor, 0)
        self.guest.supervisors.discard(self.supervisor)
        self.supervisor = None
        if self.status is None:  # it was ended: what it looked after has come to this process, and ends with it
            kill_until_none(self.guest.adopted)
            self.status = SIGKILL
        self.finish_if_read()
        if not self.outputs:
            self.finish()

    def finish_if_read(self):
        if self.status is not None and not self.outputs:
            self.finish()

    def finish(self):
        if self.over:
            return
        if self.unread >= WINDOW:  # the host has not taken yet what there was before the end
            self.guest.loop.later(DRAIN_S, self.finish)
            return
        for fd in list(self.outputs):  # what was written before the end belongs to it
            read = self.reader(fd)
            while not self.over and self.unread < WINDOW and read():
                pass
        if self.over:
            return
        self.over = True
        self.input.finish()
        for fd in self.outputs:
            self.guest.loop.watch(fd, self.reader(fd))
        dropped = 0
        for kind, kept in self.kept.items():
            value = kept.value()
            dropped += kept.dropped
            for at in range(0, len(value), CHUNK):
                self.guest.send(kind, self.stream, value[at : at + CHUNK])
        signalled = os.WIFSIGNALED(self.status)
        self.guest.tell(
            b"x",
            self.stream,
            status=-os.WTERMSIG(self.status) if signalled else os.WEXITSTATUS(self.status),
            timed_out=self.timed_out,
            oom=oom_kills() > self.ooms,
            dropped=dropped,
            seconds=time.monotonic() - self.began,
        )
        self.guest.ended(self)

    def expire(self):
        if not self.over and self.status is None:
            self.timed_out = True
            self.kill()

    def kill(self, number=SIGKILL, tries=100):
        if self.supervisor is None:
            return
        found = below(self.supervisor)
        if number == SIGKILL:
            kill_until_none(lambda: below(self.supervisor))
        else:
            for pid in found:
                kill(pid, number)
        if not found and self.status is None and tries:  # it is only just being started
            self.guest.loop.later(0.01, lambda: self.kill(number, tries - 1))


class SocketSink(Sink):
    """The end of what is written closes one direction only."""

    def finish(self):
        try:
            self.guest.streams[self.stream].socket.shutdown(1)
        except (OSError, KeyError):
            pass


class Connection:
    """One TCP connection, carried over the channel."""

    def __init__(self, guest, stream, connected):
        self.guest, self.stream, self.socket = guest, stream, connected
        self.unread, self.closed_here = 0, False
        connected.setblocking(False)
        self.input = SocketSink(guest, stream, connected.fileno(), self.read)
        guest.loop.watch(connected.fileno(), self.read)

    def read(self):
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed_here, self.input.reading = True, None
            self.guest.loop.watch(self.socket.fileno(), None, self.input.flush if self.input.pending else None)
            self.guest.send(b"f", self.stream)
            self.close_if_over()
            return
        self.guest.send(b"d", self.stream, data)
        self.unread += len(data)
        if self.unread >= WINDOW:
            self.input.reading = None
            self.guest.loop.watch(self.socket.fileno(), None, self.input.flush if self.input.pending else None)

    def acknowledge(self, count):
        held, self.unread = self.unread >= WINDOW, self.unread - count
        if held and self.unread < WINDOW and not self.closed_here:
            self.input.reading = self.read
            self.guest.loop.watch(self.socket.fileno(), self.read, self.input.flush if self.input.pending else None)

    def close_if_over(self):
        if self.closed_here and self.input.ending and not self.input.pending:
            self.kill()

    def kill(self, number=0):
        self.guest.loop.watch(self.socket.fileno())
        self.socket.close()
        self.guest.ended(self)


class Listener:
    """A port inside; every connection to it is carried to the host."""

    def __init__(self, guest, stream, ask):
        import socket  # slow to import, and seldom needed

        self.guest, self.stream = guest, stream
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", ask["port"]))
        self.socket.listen(128)
        guest.loop.watch(self.socket.fileno(), self.accept)
        guest.tell(b"s", stream, port=self.socket.getsockname()[1])

    def accept(self):
        connected, _ = self.socket.accept()
        stream = next(self.guest.own_streams)
        self.guest.streams[stream] = Connection(self.guest, stream, connected)
        self.guest.tell(b"c", stream, listener=self.stream)

    def kill(self, number=0):
        self.guest.loop.watch(self.socket.fileno())
        self.socket.close()
        self.guest.ended(self)


def regular(path, flags, mode):
    """Open a file; never wait for the other end of something that only looks like one."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if os.fstat(fd).st_mode & 0o170000 != 0o100000:
        os.close(fd)
        raise OSError(errno.EISDIR, "no regular file")
    return os.fdopen(fd, mode)


class Upload:
    """A file being written."""

    def __init__(self, guest, stream, ask):
        self.guest, self.stream, self.input, self.error = guest, stream, self, None
        folder = os.path.dirname(ask["path"])
        if folder:
            os.makedirs(folder, exist_ok=True)
        self.file = regular(ask["path"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb")
        if ask.get("mode"):
            os.fchmod(self.file.fileno(), ask["mode"])

    def feed(self, data):
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error

    def end(self):
        try:
            self.file.close()
        except OSError as error:
            self.error = self.error or error
        if self.error is None:
            self.guest.tell(b"x", self.stream)
        else:
            self.guest.fail(self.stream, self.error)
        self.guest.ended(self)

    def kill(self, number=0):
        self.file.close()
        self.guest.ended(self)
