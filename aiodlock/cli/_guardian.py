"""The process between ``aiodlock run`` and its child. Started as a script; imports nothing of ours.

It starts the child in a process group of its own and ends that group in time, by the clock alone: also
when ``aiodlock run`` is stopped, killed or starved, for then no later deadline arrives. With that group end
those that the child has made in this process' session. Being the
parent of the child, it knows when the child has ended, so it never signals a stranger with its pid.

Over a socket it is told, a line each::

    until TERM KILL   the lease is good until TERM; nothing of the child may run after KILL
    lost KILL         the lease is over: SIGTERM now, SIGKILL at KILL or earlier
    signal NUMBER     pass this on to the child's group
    go                the pid was heard: the command may start

and tells: ``pid N``, then ``exit CODE``, or ``failed CODE WHY`` when the command cannot be started. The
end of the socket says that ``aiodlock run`` is gone: SIGTERM now, SIGKILL when it was due anyway.

The child is forked first and becomes the command at ``go``, so no command ever runs that
``aiodlock run`` could not end: when this process is killed before, the child ends by itself.
Moments are of the clock that ``aiodlock run`` names, that of ``aiodlock._clock``, which all processes of a
machine share. Descriptors that were inherited are the command's.
"""

import errno
import os
import select
import signal
import sys
import time
from typing import NoReturn

_NEVER = float("inf")
#: A suspended machine does not count select's time-out down: look at the clock now and then.
_LONGEST_NAP = 0.5
#: How long members of a killed group may linger (a zombie nobody reaps) before they are given up.
_LINGER = 1.0
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
#: What Python ignores by itself.
_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")


class Guardian:
    """Mutable state: when to end the child, what was done for it already, and how it ended.

    ``gate`` lets the child become the command; ``failure`` tells that it could not, or ends when it did.
    """

    def __init__(self, fd: int, clock: int, command: list[str]) -> None:
        self.fd = fd
        self.clock = clock
        self.command = command
        self.pid = 0
        self.term_at = self.kill_at = _NEVER
        self.over = False  # the lease: nothing makes it good again
        self.code: int | None = None
        self.unread = b""
        self.gate = self.failure = -1
        self.early: list[int] = []  # signals that came before the command was there
        self.reset: list[int] = []  # what this process ignores, and the child need not

    def now(self) -> float:
        return time.clock_gettime(self.clock)

    def tell(self, line: str) -> None:
        try:
            os.write(self.fd, line.encode() + b"\n")
        except OSError:
            pass  # nobody is left to hear it

    def start(self) -> None:
        # What was ignored from the start stays so in the child: under nohup, say.
        self.reset = [
            number
            for number in (getattr(signal, name) for name in _IGNORED)
            if signal.signal(number, signal.SIG_IGN) is not signal.SIG_IGN
        ]
        # Whoever started us may ignore it, and then a child that ends leaves no exit code.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wait, self.gate = os.pipe()
        self.failure, failed = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.fd)
            os.close(self.gate)  # else its end would never be seen
            self.become(wait, failed)
        os.close(wait)
        os.close(failed)
        try:
            os.setpgid(self.pid, self.pid)  # the child does so too: whoever comes first
        except OSError:
            pass
        self.tell(f"pid {self.pid}")

    def become(self, wait: int, failed: int) -> NoReturn:
        """In the child: wait for the word, then be the command."""
        try:
            os.setpgid(0, 0)
            self.reset += [getattr(signal, name) for name in _IGNORED_BY_PYTHON]
            for number in self.reset:
                signal.signal(number, signal.SIG_DFL)
            if os.read(wait, 1):
                execute(self.command)
        except OSError as error:
            os.write(failed, str(error.errno).encode())
        finally:
            os._exit(127)

    def on_started(self) -> None:
        """The command runs, or it never will."""
        number = os.read(self.failure, 16)
        os.close(self.failure)
        self.failure = -1
        if number and not self.over:
            error = OSError(int(number), os.strerror(int(number)))
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self.tell(f"failed {code} cannot run {self.command[0]!r}: {error.strerror}")
            raise SystemExit(0)
        for early in self.early:
            signal_group(self.pid, early)
        self.early.clear()

    def go(self) -> None:
        os.write(self.gate, b"!")
        os.close(self.gate)
        self.gate = -1

    def signal_all(self, *numbers: int) -> bool:
        """Signal also the groups that the command has made, as ``timeout`` does. Return whether anything
        is left of them.

        The command's own group comes first: to find the others takes time, and may fail.
        """
        left = any([signal_group(self.pid, number) for number in numbers])
        for group in groups_of(os.getpid()) - {self.pid}:
            left |= any([signal_group(group, number) for number in numbers])
        return left

    def reap(self) -> None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code
                if self.failure >= 0:
                    self.on_started()

    def act(self) -> bool:
        """Do what is due; return whether all is done."""
        self.reap()
        # After an orderly end, what the child left behind runs on, as after any command.
        if self.code is not None and (not self.over or not self.signal_all(0)):
            return True
        moment = self.now()
        if moment >= self.term_at and not self.over:
            self.over = True
            self.signal_all(signal.SIGTERM, signal.SIGCONT)
        if moment >= self.kill_at:
            self.signal_all(signal.SIGKILL)
            return self.code is not None and moment >= self.kill_at + _LINGER
        return False

    def nap(self) -> float:
        if self.over and (self.code is not None or self.now() >= self.kill_at):
            return 0.02
        next_at = self.kill_at if self.over else min(self.term_at, self.kill_at)
        return min(max(0.0, next_at - self.now()), _LONGEST_NAP)

    def hear(self) -> bool:
        """Take what was said; return False when nobody speaks any more."""
        data = os.read(self.fd, 65536)
        if not data:
            self.term_at = 0.0
            return False
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            word, *numbers = line.decode().split()
            if word == "until" and not self.over:
                self.term_at, self.kill_at = (float(number) for number in numbers)
            elif word == "lost":
                self.term_at, self.kill_at = 0.0, min(self.kill_at, float(numbers[0]))
            elif word == "signal" and self.pid and self.failure < 0:
                signal_group(self.pid, int(numbers[0]))
            elif word == "signal":
                self.early.append(int(numbers[0]))
            elif word == "go" and self.gate >= 0:
                self.go()
        return True

    def watch(self) -> None:
        ended, wake = os.pipe()
        os.set_blocking(ended, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        spoken_to = True
        while not self.act():
            sources = select.poll()  # select knows no descriptor above 1023
            for source in (ended, self.failure, self.fd if spoken_to else -1):
                if source >= 0:
                    sources.register(source, select.POLLIN)
            ready = [source for source, _ in sources.poll(self.nap() * 1000)]
            if ended in ready:
                os.read(ended, 512)
            if self.failure in ready:
                self.on_started()
            if self.fd in ready:
                spoken_to = self.hear()
        self.tell(f"exit {self.code}")


def signal_group(group: int, number: int) -> bool:
    """Return whether anything is left of the group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def groups_of(session: int) -> set[int]:
    """Return the process groups of a session, without that of its leader; none where /proc cannot tell."""
    found: set[int] = set()
    try:
        # The numbers of another namespace would be strangers here.
        names = os.listdir("/proc") if os.readlink("/proc/self") == str(os.getpid()) else []
    except OSError:
        return found
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The program's name stands in brackets, and may hold anything.
                group, its_session = map(int, file.read().rpartition(b")")[2].split()[2:4])
        except (OSError, ValueError):  # no process, or one that has ended meanwhile
            continue
        if its_session == session != group:
            found.add(group)
    return found


def execute(command: list[str]) -> NoReturn:
    """Become the command. A text without ``#!`` is a script for ``sh``, as for a shell."""
    if not command[0]:  # Python refuses it with no OSError
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    path = found(command[0])
    if path is None:
        os.execvp(command[0], command)  # raises what tells why
    try:
        # By path: `execvp` goes on to the next file of that name where this one is a script for `sh`.
        os.execv(path, command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        with open(path, "rb") as file:
            if b"\0" in file.read(512):
                raise  # a program for another machine
        os.execv("/bin/sh", ["/bin/sh", path, *command[1:]])


def found(name: str) -> str | None:
    """Return the first executable file of that name."""
    folders = [""] if "/" in name else os.get_exec_path()
    for path in (os.path.join(folder, name) for folder in folders):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def main() -> None:
    fd, clock, *command = sys.argv[1:]
    os.set_inheritable(int(fd), False)
    guardian = Guardian(int(fd), int(clock), command)
    # The first line says until when: the child must not start without a limit.
    while guardian.kill_at == _NEVER:
        if not guardian.hear():
            return
    if guardian.now() >= guardian.term_at:
        guardian.tell("failed 76 the lease ended before the command could start")
        return
    guardian.start()
    guardian.watch()


if __name__ == "__main__":
    main()
