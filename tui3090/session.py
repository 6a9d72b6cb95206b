"""One run from the command to its exit status: trainer, run folder, screen or plain lines, signals and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tui3090 import garbage
from tui3090.afterwards import become_show
from tui3090.commands import Stop
from tui3090.dashboard.first_paint import first_paint
from tui3090.dashboard.terminal import Terminal, open_terminal
from tui3090.dashboard.view import View
from tui3090.guardian import let_go
from tui3090.headless import PlainOutput, Reporter
from tui3090.link import Commands, Outlet
from tui3090.output import OutputLog, plain
from tui3090.records import Event, Record, State
from tui3090.runlog import GATHER_S, WATCHED_S, RecordReader, RunFolder, RunLog
from tui3090.runplan import resume_command
from tui3090.settings import RunPlan
from tui3090.signals import FORCE_AFTER_S, Interrupts
from tui3090.summary import ending

if TYPE_CHECKING:
    from tui3090.dashboard.app import Dashboard
    from tui3090.launch import TrainerThread
    from tui3090.listener import Listener
    from tui3090.notify import Notifier

LEFT_S = 5.0
"""How long the screen may take to close before the process ends without it."""


class Session:
    """A run in this process. `run` does all of it. `guardian` is the pid of the process that waits for it, or 0."""

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        headless: bool,
        leave_when_over: bool,
        guardian: int = 0,
        notify: str = "",
    ) -> None:
        self._guardian = guardian
        self._notify = notify
        self._notifier: Notifier | None = None
        self._where = Path.cwd()
        self._plan = replace(plan, folder=folder.path.absolute())
        self._folder = folder
        self._headless = headless
        self._leave_when_over = leave_when_over
        self._commands = Commands()
        self._log = RunLog(folder)
        self._outlet = Outlet(self._log)
        again = resume_command(str(plan.recipe), plan.name, folder.path)
        self._view = View(name=plan.name, folder=str(folder.path), again=again, begun=plan.settings)
        self._trainer: TrainerThread | None = None
        self._listener: Listener | None = None
        self._noting = threading.Lock()
        self._interrupts = Interrupts()
        self._force_at: float | None = None
        self._problem = ""
        self._output = OutputLog(folder.output)
        self._output_problem = ""

    def run(self) -> int:
        """Train until the run is over or left; the exit status. Where training can't be stopped, ends the process."""
        terminal = None if self._headless else open_terminal()
        try:
            with self._output as output:
                if terminal is None or not self._on_screen(terminal, output):
                    out = PlainOutput(output.stdout)
                    if terminal is not None and (self._view.left or terminal.gone):
                        self._leave_terminal(out, output, terminal)
                        terminal = None
                    elif terminal is not None:
                        out.say("tui3090: the screen failed (output.log says why); training goes on with plain lines")
                    self._in_plain_lines(out)
                status = self._end()
            if terminal is not None and self._to_be_looked_at():
                terminal.restore()
                with contextlib.suppress(OSError):
                    os.chdir(self._where)  # a train.py may have gone elsewhere
                become_show(terminal, self._view, self._where / self._folder.path, status)
        finally:
            if terminal is not None:
                terminal.restore()
                terminal.close()
        self._say_how_it_ended(status)
        if self._trainer is not None and self._trainer.is_alive():
            end_now(status)  # a thread that does not stop would hold the interpreter's exit
        return status

    def _start_training(self) -> None:
        """Begin; with a screen this comes after its first paint, so what takes time is imported here."""
        from tui3090.launch import start_trainer
        from tui3090.runinfo import run_info

        if self._plan.resume:
            self._recall()
        self._note(**run_info(self._plan), socket=self._listen(), exit_status=None)
        if self._notify:
            from tui3090.notify import Notifier

            folder = (self._where / self._folder.path).absolute()
            self._notifier = Notifier(self._notify, folder, self._plan.name, self._outlet.emit)
        self._trainer = start_trainer(self._plan, self._commands, self._emit)

    def _emit(self, record: Record) -> None:
        """Where the trainer's and the poller's records go."""
        self._outlet.emit(record)
        if self._notifier is not None:
            self._notifier.look(record)

    def _listen(self) -> str:
        """Let `tui3090 show` of other terminals send commands; the socket's path, empty where there can be none."""
        from tui3090.listener import Listener, Unreachable

        try:
            self._listener = Listener(
                self._where / self._folder.path,
                self._commands,
                self._attended,
                lambda path: self._note(socket=str(path)),
            )
        except Unreachable as error:
            self._outlet.emit(Event(time=time.time(), level="warning", source="run", text=str(error)))
            return ""
        return str(self._listener.path)

    def _attended(self, viewers: int) -> None:
        """So many others look at the run and press keys."""
        self._commands.attend(viewers)
        self._log.gather_s = WATCHED_S if viewers else GATHER_S

    def _leave_terminal(self, out: PlainOutput, output: OutputLog, terminal: Terminal) -> None:
        """Training goes on without this terminal: the user left it running, or the terminal was closed."""
        if self._view.left and not terminal.gone:
            terminal.restore()
            out.say(
                f"tui3090: {plain(self._view.name)} goes on.  Come back: tui3090 show   Stop it: kill {os.getpid()}",
                patience_s=1.0,
            )
        output.let_go()
        terminal.close()
        let_go(self._guardian)
        with contextlib.suppress(OSError):  # of a process group of its own already
            os.setsid()  # what the shell does with its jobs, and a hang-up, are no business of the run any more

    def _to_be_looked_at(self) -> bool:
        """Whether the run is over by itself, and its screen should stay until somebody has seen it."""
        return not (
            self._leave_when_over
            or self._interrupts.first is not None
            or self._view.left
            or self._view.stop_asked
            or self._view.state.state not in ("finished", "failed")
            or self._view.first_step_time is None
            or (self._trainer is not None and self._trainer.is_alive())
            or self._problem
            or self._log.problem
        )

    def _recall(self) -> None:
        """Show what the run was before: its curve goes on. Its states and times are of a process that is gone."""
        reader = RecordReader(self._folder.records)
        while not reader.at_end:
            self._view.absorb(record for record in reader.read() if not isinstance(record, State))
        self._view.first_time = self._view.first_step_time = None
        self._view.recent.clear()

    def _on_screen(self, terminal: Terminal, output: OutputLog) -> bool:
        """Run the dashboard. Returns whether the run is done with; False: the screen is lost and training goes on."""
        first_paint(terminal, self._view)
        with garbage.later():
            from tui3090.dashboard.app import Dashboard
            from tui3090.dashboard.driver import run_on
            from tui3090.dashboard.others import REST_S, read_last_run
            from tui3090.dashboard.source import LiveSource

        def start() -> None:
            output.take_streams()
            self._start_training()
            read_last_run(self._where / self._folder.path, self._folder.read_info(), self._view.others, REST_S)

        app = Dashboard(LiveSource(self._outlet, self._commands, start), self._view)
        left = threading.Event()
        threading.Thread(target=self._watch, args=(app, terminal, left), name="watch", daemon=True).start()
        try:
            run_on(terminal, app)
        finally:
            left.set()
        if terminal.gone or app.return_code:
            return False
        return not self._view.left or self._view.over

    def _watch(self, app: Dashboard, terminal: Terminal, left: threading.Event) -> None:
        """Beside the screen: pass signals on to the trainer, and close the screen when there is nothing more to see."""
        while not self._nothing_more_to_see():
            if left.wait(0.1):
                return
            self._look_at_output()
        app.exit()
        if self._interrupts.first is not None and not left.wait(LEFT_S):
            terminal.give_up()
            terminal.restore()
            end_now(128 + self._interrupts.first)

    def _nothing_more_to_see(self) -> bool:
        if self._interrupted():
            return self._trainer is None or not self._trainer.is_alive() or self._forced()
        if not self._view.over:
            return False
        return self._trainer is None or not self._trainer.is_alive()

    def _in_plain_lines(self, out: PlainOutput) -> None:
        """Train without a screen until the run is over; where the terminal was hung up, `out` takes nothing."""
        self._commands.leave_unattended(seen=self._view.left)
        if self._trainer is None:
            self._start_training()
            assert self._trainer is not None
        reporter = Reporter(self._view)
        while True:
            over = not self._trainer.is_alive()
            self._look_at_output()
            for line in reporter.lines(self._outlet.drain()):
                out.say(line)
            if over or (self._interrupted() and self._forced()):
                return
            self._trainer.join(0.2)

    def _interrupted(self) -> bool:
        """Whether SIGINT or SIGTERM came; the first call after it asks the trainer to stop."""
        if self._interrupts.first is None:
            return False
        if self._force_at is None:
            self._force_at = time.monotonic() + FORCE_AFTER_S
            self._commands.send(Stop())
            name = signal.Signals(self._interrupts.first).name
            text = f"{name}: stopping at the window's end; a second one leaves at once"
            self._outlet.emit(Event(time=time.time(), level="warning", source="run", text=text))
        return True

    def _forced(self) -> bool:
        """Whether training had its time to stop."""
        if self._interrupts.count > 1:
            return True
        late = self._force_at is not None and time.monotonic() > self._force_at
        return late and not self._commands.saving.is_set()

    def _end(self) -> int:
        """Stop what still runs, and write into run.json how it ended."""
        trainer = self._trainer
        if trainer is not None and trainer.is_alive() and self._interrupts.first is None:
            # the user left without waiting for the window's end; one who forced it has waited already
            forced = self._commands.stop_now.is_set() and not self._commands.saving.is_set()
            self._commands.send(Stop(now=True))
            trainer.join(0 if forced else LEFT_S)
        self._view.absorb(self._outlet.drain())
        status = 0 if trainer is None or trainer.exit_status is None else trainer.exit_status
        if self._interrupts.first is not None:
            status = 128 + self._interrupts.first
        step = self._view.step
        if self._listener is not None:
            self._listener.close()
        if self._notifier is not None:
            self._notifier.close()
        self._log.close()
        self._note(
            ended=time.time(),
            state=self._view.state.state,
            detail=self._view.state.detail,
            steps=step.step if step else 0,
            exit_status=status,
        )
        return status

    def _note(self, **changes: Any) -> None:
        """Set keys of run.json; on a full disk the run goes on without."""
        try:
            with self._noting:
                RunFolder(self._where / self._folder.path).write_info(**changes)
            self._problem = ""
        except OSError as error:
            self._problem = f"run.json can't be written: {error.strerror}."
            self._tell(self._problem)

    def _look_at_output(self) -> None:
        """Tell of an output.log that the disk does not take, and when it does again."""
        problem = self._output.problem
        if problem != self._output_problem:
            self._output_problem = problem
            self._tell(problem or f"output.log is written again: {self._output.lost:,} bytes are lost.")

    def _tell(self, sentence: str) -> None:
        self._outlet.emit(Event(time=time.time(), level="warning", source="run", text=sentence))

    def _say_how_it_ended(self, status: int) -> None:
        lines = ending(self._view, self._folder.output)
        lines += [plain(problem) for problem in (self._problem, self._log.problem, self._output.problem) if problem]
        out = PlainOutput(2 if status == 2 else 1)
        for line in lines:
            out.say(line, patience_s=1.0)


def end_now(status: int) -> None:
    """End the process without waiting for its threads; loader workers end too."""
    import multiprocessing  # not at the top, where the first paint would wait for it

    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
