"""What key presses ask for, without a screen."""

from __future__ import annotations

import pytest

from tests.dashboard.views import NOW, started, step
from tui3090.commands import Change, Command, Evaluate, MeasureActivations, Pause, Profile, Stop, Withdraw
from tui3090.dashboard.keys import SETTLE_S, Keys, next_window, pending_text
from tui3090.dashboard.view import View
from tui3090.records import Activations, Available, Changed, Record, Refused, State
from tui3090.settings import BY_NAME, Settings, Value


class Pressed:
    """Keys over a view of a run in training, with clocks that stand until they are moved."""

    def __init__(self, *records: Record, read_only: str = "") -> None:
        self.view = View()
        self.see(State(time=NOW - 60, state="training"), step(1412), *records)
        self.sent: list[Command] = []
        self.passed = 0.0
        self.keys = Keys(self.view, self.sent.append, read_only, lambda: NOW + self.passed, lambda: self.passed)

    def see(self, *records: Record) -> None:
        self.view.absorb(records)

    def press(self, *names: str, backwards: bool = False) -> None:
        for name in names:
            self.keys.press(name, backwards)

    def wait(self, seconds: float) -> None:
        self.passed += seconds
        self.keys.settle()


def changed(technique: str, old: Value, new: Value, at: int = 1414) -> Changed:
    return Changed(time=NOW, step=at, technique=technique, old=old, new=new)


@pytest.fixture
def pressed() -> Pressed:
    return Pressed()


class TestSettling:
    def test_a_press_is_sent_once_it_has_settled(self, pressed: Pressed) -> None:
        pressed.press("amp")
        pressed.wait(SETTLE_S - 0.01)
        assert pressed.sent == []
        assert pressed.view.answer == "AMP ▸ bf16, from step 1 414   esc cancels"
        pressed.wait(0.02)
        assert pressed.sent == [Change("amp", "bf16")]
        assert pressed.view.pending["amp"].sent

    def test_several_presses_are_one_change(self, pressed: Pressed) -> None:
        for _ in range(4):
            pressed.press("accumulate")
            pressed.wait(SETTLE_S / 2)
        assert pressed.sent == []
        pressed.wait(SETTLE_S)
        assert pressed.sent == [Change("accumulate", 16)]

    def test_coming_back_to_what_is_in_force_asks_for_nothing(self, pressed: Pressed) -> None:
        pressed.press("tf32", "tf32")
        pressed.wait(1)
        assert pressed.sent == []
        assert pressed.view.pending == {}
        assert pressed.view.answer == "TF32 stays off."

    def test_a_press_after_sending_takes_the_sent_one_back(self, pressed: Pressed) -> None:
        pressed.press("amp")
        pressed.wait(1)
        pressed.press("amp")
        assert pressed.sent == [Change("amp", "bf16"), Withdraw("amp")]
        pressed.wait(1)
        assert pressed.sent[2:] == [Change("amp", "fp16")]

    def test_capitals_go_backwards(self, pressed: Pressed) -> None:
        pressed.press("amp", backwards=True)
        pressed.wait(1)
        assert pressed.sent == [Change("amp", "fp16")]

    def test_presses_count_from_the_settings_the_run_began_with(self) -> None:
        pressed = Pressed(started(settings=Settings(accumulate=4, checkpointing=2).short()))
        pressed.press("accumulate", "checkpointing")
        pressed.wait(1)
        assert pressed.sent == [Change("accumulate", 8), Change("checkpointing", 1)]

    def test_at_its_end_a_list_that_does_not_wrap_says_so(self, pressed: Pressed) -> None:
        pressed.press("accumulate", backwards=True)
        pressed.wait(1)
        assert pressed.sent == []
        assert pressed.view.answer == "accumulation: 1 is the least."


class TestPending:
    def test_it_ends_when_the_change_is_in_force(self, pressed: Pressed) -> None:
        pressed.press("amp")
        pressed.wait(1)
        pressed.see(changed("amp", "off", "bf16"))
        assert pressed.view.pending == {}
        assert pressed.view.value("amp") == "bf16"

    def test_an_earlier_change_that_comes_into_force_does_not_end_it(self, pressed: Pressed) -> None:
        pressed.press("amp")
        pressed.wait(1)
        pressed.press("amp")
        pressed.see(changed("amp", "off", "bf16"))
        pressed.wait(1)
        assert pressed.sent[-1] == Change("amp", "fp16")

    def test_a_refusal_ends_it_and_is_the_answer(self, pressed: Pressed) -> None:
        pressed.press("graph")
        pressed.wait(1)
        pressed.see(Refused(time=NOW, technique="graph", value=True, reason="Graph replay needs a CUDA card."))
        assert pressed.view.pending == {}
        assert pressed.view.answer == "Graph replay needs a CUDA card."

    def test_the_end_of_the_run_ends_it(self, pressed: Pressed) -> None:
        pressed.press("graph")
        pressed.see(State(time=NOW, state="finished"))
        assert pressed.view.pending == {}

    def test_escape_withdraws_what_was_sent_and_forgets_what_was_not(self, pressed: Pressed) -> None:
        pressed.press("amp")
        pressed.wait(1)
        pressed.press("tf32")
        assert pressed.keys.cancel()
        pressed.wait(1)
        assert pressed.sent == [Change("amp", "bf16"), Withdraw("amp")]
        assert pressed.view.answer == "Cancelled: AMP, TF32."
        assert not pressed.keys.cancel()

    def test_the_step_it_comes_at_follows_the_pace(self) -> None:
        view = View()
        assert next_window(view, NOW) == (1, 0.0)
        view.absorb([State(time=NOW, state="training"), step(10, time=NOW, seconds=30.0)])
        assert next_window(view, NOW + 12) == (12, 18.0)
        view.absorb([State(time=NOW, state="paused")])
        assert next_window(view, NOW + 500) == (11, 0.0)
        assert pending_text(view, BY_NAME["amp"], NOW) == ""


class TestUndo:
    def test_it_asks_for_what_the_last_change_took_away(self, pressed: Pressed) -> None:
        pressed.see(changed("amp", "off", "bf16"), changed("accumulate", 2, 4))
        pressed.keys.undo()
        pressed.wait(1)
        assert pressed.sent == [Change("accumulate", 2)]

    def test_there_may_be_nothing_to_undo(self, pressed: Pressed) -> None:
        pressed.keys.undo()
        pressed.wait(1)
        assert pressed.sent == []
        assert pressed.view.answer == "Nothing to undo: no technique was changed in this run."


class TestRefusing:
    def test_what_this_machine_lacks_answers_with_its_sentence(self) -> None:
        pressed = Pressed(Available(time=NOW, technique="graph", reason="needs a CUDA card\x1b[2J"))
        pressed.press("graph")
        pressed.wait(1)
        assert pressed.sent == []
        assert pressed.view.answer == "graph replay: needs a CUDA card␛[2J"

    def test_what_is_on_can_be_switched_off_all_the_same(self) -> None:
        pressed = Pressed(changed("tf32", False, True), Available(time=NOW, technique="tf32", reason="no effect"))
        pressed.press("tf32")
        pressed.wait(1)
        assert pressed.sent == [Change("tf32", False)]

    def test_locked_keys_do_nothing_until_they_are_unlocked(self, pressed: Pressed) -> None:
        pressed.keys.lock()
        pressed.press("amp")
        pressed.keys.pause()
        pressed.keys.evaluate()
        pressed.keys.undo()
        pressed.wait(1)
        assert pressed.sent == []
        assert pressed.view.answer == "The keys are locked: n unlocks them."
        pressed.keys.lock()
        pressed.press("amp")
        pressed.wait(1)
        assert pressed.sent == [Change("amp", "bf16")]

    def test_keys_over_a_run_folder_do_nothing(self) -> None:
        pressed = Pressed(read_only="This is a look.")
        pressed.press("amp")
        pressed.keys.pause()
        pressed.wait(1)
        assert pressed.sent == []
        assert pressed.view.answer == "This is a look."

    def test_after_the_end_keys_say_that_it_is_over(self, pressed: Pressed) -> None:
        pressed.see(State(time=NOW, state="failed", detail="boom"))
        pressed.press("amp")
        assert pressed.view.answer == "The run is over (failed): q leaves."


class TestPauseEvaluateStop:
    def test_space_pauses_and_goes_on(self, pressed: Pressed) -> None:
        pressed.keys.pause()
        pressed.see(State(time=NOW, state="paused"))
        pressed.keys.pause()
        assert pressed.sent == [Pause(True), Pause(False)]

    def test_there_is_nothing_to_pause_while_loading(self, pressed: Pressed) -> None:
        pressed.see(State(time=NOW, state="loading"))
        pressed.keys.pause()
        assert pressed.sent == []
        assert pressed.view.answer == "Not while loading."

    @pytest.mark.parametrize(
        ("state", "when"),
        [("training", "at the end of the step"), ("paused", "now"), ("loading", "before the first step")],
    )
    def test_when_a_save_comes_is_told(self, pressed: Pressed, state: str, when: str) -> None:
        pressed.see(State(time=NOW, state=state))
        pressed.keys.save()
        assert pressed.view.answer == f"Saving {when}; training waits for the copy alone."

    def test_the_tensor_cores_are_read_where_there_are_some(self, pressed: Pressed) -> None:
        pressed.keys.profile()
        assert pressed.sent == [Profile()]
        pressed.see(started(device="cpu"))
        pressed.keys.profile()
        assert pressed.sent == [Profile()]
        assert pressed.view.answer == "Reading Tensor Cores needs an NVIDIA card, and training runs on the CPU."

    def test_activations_are_measured_on_request_and_told(self, pressed: Pressed) -> None:
        pressed.keys.measure_activations()
        assert pressed.sent == [MeasureActivations()]
        pressed.see(Activations(time=NOW, step=1413, total=5, layers="5 head"))
        assert pressed.view.answer == "Activations measured: 3 shows the layers."

    def test_evaluate(self, pressed: Pressed) -> None:
        pressed.keys.evaluate()
        assert pressed.sent == [Evaluate()]

    def test_force_acts_only_while_stopping(self, pressed: Pressed) -> None:
        assert not pressed.keys.force()
        assert pressed.sent == []
        pressed.keys.stop()
        assert pressed.view.doing == "stopping"
        assert pressed.keys.force()
        assert pressed.sent == [Stop(), Stop(now=True)]
