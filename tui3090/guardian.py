"""The guardian: a small process that waits for the one that trains, and gives the terminal back when that one can't.

It is forked before anything heavy is imported and stays in the same process group, so that ctrl+c, a stop and a new
size of the window reach the run as if it were not there. It passes on what was sent to it alone, ends with the run's
exit status, restores the terminal when the run died by a signal, and ends early when the run is left running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from tui3090.dashboard.terminal import Terminal
from tui3090.recipe import harmless
from tui3090.runlog import RunFolder, RunFolderError

LEFT = signal.SIGRTMIN + 7
"""From the run to its guardian: it goes on without a screen, and the shell may have its prompt back."""
PASSED_ON = {signal.SIGRTMIN + 8: signal.SIGINT, signal.SIGRTMIN + 9: signal.SIGTERM}
"""From the guardian to the run -> the signal that it stands for. One to the whole group reaches the run itself too:
that it comes by another number tells it from a second one."""
HELD_BACK = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, LEFT, *PASSED_ON}
"""Signals that wait until they are asked for (guardian), or until their handlers stand (run: `signals.Interrupts`)."""
BY_THE_KERNEL = 0x80
"""si_code of a signal that the terminal sent, to the whole group."""


def fork(terminal: Terminal, folder: RunFolder, again: str, notify: str) -> tuple[int, int | None]:
    """Fork; called with nothing running yet. In the run returns the guardian's pid and None.

    In the guardian it returns only when there is nothing to wait for any more: 0 and the exit status. `again` is the
    command that resumes the run, `notify` the user's that hears of its end. Without room for a process: 0 and None.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    guardian = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as a parent may have left it, it would hide the run's end
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        run = os.fork()
    except OSError:
        return 0, None
    if run == 0:
        return guardian, None
    return 0, _wait(run, terminal, folder, again, notify)


def let_go(guardian: int) -> None:
    """Tell the guardian that the run is left running; nothing where it is gone (or 0: there never was one)."""
    if guardian and os.getppid() == guardian:
        os.kill(guardian, LEFT)


def _wait(run: int, terminal: Terminal, folder: RunFolder, again: str, notify: str) -> int:
    """Wait for the run's end, or its word that it is left running; the exit status."""
    numbers = {signal_: number for number, signal_ in PASSED_ON.items()}
    while True:
        came = signal.sigwaitinfo(HELD_BACK)
        if came.si_signo == LEFT and came.si_pid == run:
            return 0
        if came.si_signo in numbers and came.si_code != BY_THE_KERNEL:
            os.kill(run, numbers[signal.Signals(came.si_signo)])
        if came.si_signo != signal.SIGCHLD:
            continue
        ended, status = os.waitpid(run, os.WNOHANG)
        if ended != run:
            continue
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        number = os.WTERMSIG(status)
        terminal.give_up()
        terminal.restore()
        # killed before its handlers stood by one that was passed on: that one counts
        number = PASSED_ON.get(number, number)
        _tell(number, folder, again, notify)
        return 128 + number


def _tell(number: int, folder: RunFolder, again: str, notify: str) -> None:
    """Say what happened and how to go on."""
    from tui3090.headless import PlainOutput  # not at the top, where the first paint would wait for it

    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    try:
        over = folder.read_info().get("exit_status") is not None
    except RunFolderError:
        over = False
    if over:
        said = f"{name} ended the screen of a run that was over already: see it with tui3090 show {folder.path}"
    else:
        why = " (from outside: by somebody, or by the system for want of memory, which dmesg then tells)"
        if number != signal.SIGKILL:
            why = f": its last words are in {folder.output}"
        saved = any(folder.path.glob("saves/step-*"))
        said = f"{name} ended training{why}. " + (f"Go on with: {again}" if saved else "It had not saved anything yet.")
    PlainOutput(2).say(f"tui3090: {harmless(said)}", patience_s=1.0)
    if notify and not over:
        from tui3090.notify import start

        with contextlib.suppress(OSError):
            start(notify, folder.path.absolute(), folder.path.name, "failed", None, None, said)
