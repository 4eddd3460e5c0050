"""Readiness, time, and what can be done to processes; needs Python 3.6 and nothing else.

Every import here is time that an episode waits: `signal`, `json` and `subprocess` cost more than Python itself.
"""

import heapq
import itertools
import os
import select
import struct
import time

SIGKILL, SIGPIPE = 9, 13
CHUNK, WINDOW, DRAIN_S = 1 << 16, 1 << 20, 0.2
READABLE, WRITABLE = select.POLLIN | select.POLLHUP | select.POLLERR, select.POLLOUT | select.POLLERR
SUBREAPER, DUMPABLE = 36, 4  # of prctl(2)


def prctl(option, value):
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except Exception:  # a Python without ctypes: a command's orphans may then outlive it
        pass


def encode(value):
    """JSON of numbers, texts, lists and dictionaries."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{%s}" % ",".join("%s:%s" % (encode(key), encode(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return "[%s]" % ",".join(map(encode, value))
    if isinstance(value, str):
        return '"%s"' % "".join(
            c if " " <= c <= "~" and c not in '"\\' else "\\u%04x" % min(ord(c), 0xFFFD) for c in value
        )
    return repr(value)


class Loop:
    """Readiness and time."""

    def __init__(self):
        self.poll, self.calls = select.poll(), {}
        self.timers, self.numbers = [], itertools.count()

    def watch(self, fd, reading=None, writing=None):
        """Call these when `fd` is ready, and no longer what was set before."""
        if reading or writing:
            self.calls[fd] = calls = (reading, writing)
            self.poll.register(fd, (select.POLLIN if calls[0] else 0) | (select.POLLOUT if calls[1] else 0))
        elif self.calls.pop(fd, None):
            self.poll.unregister(fd)

    def later(self, seconds, call):
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.numbers), call))

    def run(self):
        while True:
            wait = max(0, int(1000 * (self.timers[0][0] - time.monotonic())) + 1) if self.timers else None
            found = [(fd, mask, self.calls.get(fd)) for fd, mask in self.poll.poll(wait)]
            for fd, mask, calls in found:
                for call, event in ((0, READABLE), (1, WRITABLE)):
                    # another's turn may have closed or changed it
                    if calls and mask & event and calls[call] and self.calls.get(fd) is calls:
                        self.safely(calls[call])
            while self.timers and self.timers[0][0] <= time.monotonic():
                self.safely(heapq.heappop(self.timers)[2])

    def safely(self, call):
        """One stream's trouble (no descriptors, no processes left) is not the others'."""
        try:
            call()
        except OSError:
            time.sleep(0.01)


class Kept:
    """Head and tail of an output, in bounded memory."""

    def __init__(self, limit):
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0
        self.most, self.rest = limit - limit // 2, limit // 2

    def feed(self, data):
        room = max(0, self.most - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > self.rest + CHUNK:
            self.cut()

    def cut(self):
        excess = max(0, len(self.tail) - self.rest)
        del self.tail[:excess]
        self.dropped += excess

    def value(self):
        self.cut()
        mark = b"\n[... %d bytes cut ...]\n" % self.dropped if self.dropped else b""
        return bytes(self.head) + mark + bytes(self.tail)


class Sink:
    """Writes to a pipe or socket as fast as its reader takes it; tells the host what has gone."""

    def __init__(self, guest, stream, fd, reading=None):
        self.guest, self.stream, self.fd, self.reading = guest, stream, fd, reading
        self.pending, self.ending, self.gone = bytearray(), False, False
        os.set_blocking(fd, False)

    def feed(self, data):
        if self.gone:
            self.acknowledge(len(data))  # dropped: nobody reads it, and the host need not hold back for it
            return
        self.pending += data
        self.flush()

    def acknowledge(self, count):
        if count:
            self.guest.send(b"a", self.stream, struct.pack(">I", count))

    def end(self):
        self.ending = True
        self.flush()

    def flush(self):
        done = 0
        try:
            while self.pending and not self.gone:
                n = os.write(self.fd, self.pending[:CHUNK])
                del self.pending[:n]
                done += n
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            self.gone = True
            done += len(self.pending)
            self.pending.clear()
        self.acknowledge(done)
        self.guest.loop.watch(self.fd, self.reading, self.flush if self.pending else None)
        if self.ending and not self.pending:
            self.finish()

    def finish(self):
        if self.fd >= 0:
            self.guest.loop.watch(self.fd)
            os.close(self.fd)
            self.fd, self.gone = -1, True
            self.acknowledge(len(self.pending))
            self.pending.clear()


def user_changer(name, environment):
    """What makes a new process another user's; KeyError for one that is not known."""
    import pwd

    try:
        entry = pwd.getpwuid(int(name)) if str(name).isdigit() else pwd.getpwnam(name)
        uid, gid, groups = entry.pw_uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
        environment.update(HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name)
    except KeyError:
        if not str(name).isdigit():
            raise
        uid = gid = int(name)
        groups = []

    def change():
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)

    return change


def kill(pid, number=SIGKILL):
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def processes():
    """(pid, parent, when it started, session, state) of everything that lives."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name) as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                yield int(name), int(fields[1]), int(fields[19]), int(fields[3]), fields[0]


def below(root):
    """Processes that descend from one, without it."""
    children = {}
    for pid, parent, _, _, _ in processes():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [root]
    while waiting:
        more = children.get(waiting.pop(), ())
        found += more
        waiting += more
    return found


def keyring():
    """A session keyring of its own: the driver's keys stay the driver's."""
    numbers = {"x86_64": 250, "aarch64": 219}
    try:
        import ctypes

        ctypes.CDLL(None).syscall(numbers[os.uname().machine], 1, None)
    except Exception:  # a kernel without keyrings
        pass


def kill_until_none(find, rounds=500):
    for _ in range(rounds):
        found = find()
        for pid in found:
            kill(pid)
        if not found:
            return
        time.sleep(0.002)


def oom_kills():
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as file:
                return int(dict(line.split() for line in file.read().splitlines()).get("oom_kill", 0))
        except (OSError, ValueError):
            continue
    return 0
