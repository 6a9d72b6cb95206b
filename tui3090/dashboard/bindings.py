"""Which key asks for what. What the keys of techniques are comes from the one table of techniques."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from tui3090.dashboard.frame import CONTENTS, NUMBERS
from tui3090.settings import TECHNIQUES


def bindings() -> list[BindingType]:
    """The keys of the techniques, from their table, and all others."""
    bound: list[BindingType] = []
    for technique in TECHNIQUES:
        also = {"+": ",=", "-": ",_"}
        for key, backwards in ((technique.key, False), (technique.back, True)):
            bound.append(
                Binding(
                    key + also.get(key, ""),
                    f"technique('{technique.name}', {backwards})",
                    technique.title,
                    id=f"{technique.name}{'-back' if backwards else ''}",
                    tooltip=technique.sentence,
                )
            )
    others = (
        ("space", "pause", "Pause at the end of the step, and go on"),
        ("e", "evaluate", "Evaluate at the end of the step"),
        ("s", "save", "Save at the end of the step"),
        ("b", "go_back", "While paused: back to the last good save"),
        ("r", "profile", "Read the Tensor Cores with the next step"),
        ("m", "measure_activations", "Measure with the next step what each layer keeps for backward"),
        ("u", "undo", "Undo the last change"),
        ("escape", "cancel", "Cancel what is pending; leave a zoomed panel"),
        ("n", "lock", "Lock the keys"),
        ("l", "zoom('log')", "The log on the whole screen, and back"),
        ("x", "picture", "A picture of the screen"),
        ("question_mark,h", "help", "Help"),
        ("ctrl+l", "repaint", "Paint everything again"),
        ("q", "leave", "Leave, after a question"),
        ("Q", "force", "While stopping: stop at once"),
    )
    bound += [Binding(key, action, words, id=action.split("(")[0], tooltip=words) for key, action, words in others]
    for key, panel in NUMBERS.items():
        words = f"{CONTENTS[panel].TITLE} on the whole screen, and back"
        bound.append(Binding(key, f"zoom('{panel}')", words, id=f"zoom-{panel}", tooltip=words))
    return bound
