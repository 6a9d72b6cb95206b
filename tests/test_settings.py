"""The table of techniques: keys, values, options, and that each has its module."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tui3090.settings import BY_NAME, CORES, TECHNIQUES, Settings, Technique
from tui3090.techniques import MODULES, Machine, reason_unavailable, refusal
from tui3090.techniques.together import PAIRS


def test_table_settings_and_modules_name_the_same_techniques() -> None:
    names = [technique.name for technique in TECHNIQUES]
    assert names == [field.name for field in fields(Settings)] == list(MODULES)
    keys = [key for technique in TECHNIQUES for key in (technique.key, technique.back)]
    assert len(keys) == len(set(keys))
    for technique in TECHNIQUES:
        assert getattr(Settings(), technique.name) in technique.values


@given(st.sampled_from(TECHNIQUES), st.data())
def test_a_value_is_parsed_from_what_the_screen_and_the_option_call_it(
    technique: Technique, data: st.DataObject
) -> None:
    value = data.draw(st.sampled_from(technique.values))
    if not technique.labels:
        assert technique.parse(technique.label(value)) == value
    assert technique.parse(technique.label(value)) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("amp", "bf16", "bf16"),
        ("checkpointing", "all", 1),
        ("checkpointing", "off", 0),
        ("checkpointing", "3", 3),
        ("accumulate", "3", 3),
        ("workers", "2", 2),
        ("prefetch", "off", 0),
        ("graph", "on", True),
        ("lr", "0.7", 0.7),
    ],
)
def test_options(name: str, text: str, value: object) -> None:
    parsed = BY_NAME[name].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"), [("amp", "fp8"), ("checkpointing", "some"), ("graph", "1"), ("workers", "two")]
)
def test_a_wrong_option_is_a_sentence(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, not '{text}'"):
        BY_NAME[name].parse(text)


def test_keys_go_through_the_values() -> None:
    amp, plus = BY_NAME["amp"], BY_NAME["accumulate"]
    assert [amp.after("off"), amp.after("fp16"), amp.after("off", backwards=True)] == ["bf16", "off", "fp16"]
    assert [
        plus.after(1),
        plus.after(64),
        plus.after(1, backwards=True),
        plus.after(3),
        plus.after(3, backwards=True),
    ] == [
        2,
        64,
        1,
        4,
        2,
    ]
    assert BY_NAME["checkpointing"].after(5) == 0
    assert BY_NAME["workers"].values[-1] == CORES


@pytest.mark.parametrize(
    "wrong",
    [{"amp": "fp8"}, {"accumulate": 0}, {"accumulate": True}, {"workers": -1}, {"checkpointing": 1.5}, {"lr": 0.0}],
)
def test_settings_refuse_what_no_step_can_run_under(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(Settings(), **wrong)  # type: ignore[arg-type]


def test_short_names_what_differs() -> None:
    assert Settings().short() == ""
    assert Settings(amp="bf16", checkpointing=2, graph=True, lr=0.5).short() == (
        "amp=bf16 checkpointing=every2nd graph=on lr=×0.5"
    )


def test_on_the_cpu_everything_says_whether_it_can_be_had() -> None:
    machine = Machine(torch.device("cpu"), blocks=4, torch_version=(2, 13))
    reasons = {t.name: reason_unavailable(t.name, machine, Settings()) for t in TECHNIQUES}
    assert {name for name, reason in reasons.items() if not reason} == {
        "amp",
        "checkpointing",
        "accumulate",
        "compile",
        "workers",
        "lr",
    }
    assert all(reason.endswith(".") for reason in reasons.values() if reason)


@pytest.mark.parametrize(
    ("machine", "settings", "words"),
    [
        (Machine(torch.device("cuda", 0), (7, 5), (2, 13), 4), Settings(amp="bf16"), "fp16 works here"),
        (Machine(torch.device("cuda", 0), (7, 5), (2, 13), 4), Settings(tf32=True), "Ampere"),
        (Machine(torch.device("cuda", 0), (8, 6), (2, 9), 4), Settings(graph=True, checkpointing=1), "torch 2.10"),
        (Machine(torch.device("cuda", 0), (8, 6), (2, 13), 0), Settings(checkpointing=1), "Recipe(blocks=[...])"),
        (Machine(torch.device("cuda", 0), (8, 6), (2, 13), 4), Settings(workers=1000), "more than twice"),
    ],
)
def test_which_techniques_go_together(machine: Machine, settings: Settings, words: str) -> None:
    assert words in (refusal(machine, settings) or "")
    assert refusal(Machine(torch.device("cuda", 0), (8, 6), (2, 13), 4), replace(settings, workers=0)) is None


CARD = Machine(torch.device("cuda", 0), (8, 6), (2, 13), blocks=12)
MEET = ("graph", "compile", "offload", "checkpointing")


def test_the_table_has_a_row_for_any_two_techniques_that_meet_in_a_step() -> None:
    rows = [frozenset((pair.one, pair.other)) for pair in PAIRS]
    assert len(rows) == len(set(rows))
    assert {frozenset(two) for two in combinations(MEET, 2)} <= set(rows)
    for pair in PAIRS:
        assert pair.one in BY_NAME
        assert pair.other in BY_NAME or "optimizer" in pair.other
        assert pair.how.endswith(".")


def test_every_combination_can_be_had_or_is_refused_with_a_sentence() -> None:
    values = [BY_NAME[name].values for name in ("amp", "accumulate", "tf32", *MEET)]
    walked = 0
    for amp, accumulate, tf32, graph, compile, offload, checkpointing in product(*values):
        settings = Settings(
            amp=amp,  # type: ignore[arg-type]
            accumulate=accumulate,  # type: ignore[arg-type]
            tf32=bool(tf32),
            graph=bool(graph),
            compile=bool(compile),
            offload=bool(offload),
            checkpointing=checkpointing,  # type: ignore[arg-type]
        )
        walked += 1
        reason = refusal(CARD, settings)
        assert (reason is not None) == bool(graph and offload), settings
        assert reason is None or reason.startswith("Offload and graph replay exclude each other")
        reason = refusal(replace(CARD, torch_version=(2, 9)), settings)
        assert (reason is not None) == bool(graph and (offload or checkpointing)), settings
        assert reason is None or reason.endswith(".")
    assert walked == 3 * 7 * 2 * 2 * 2 * 2 * 3


@pytest.mark.parametrize(
    ("machine", "settings", "words"),
    [
        (replace(CARD, no_compiler="compile unavailable: no compiler."), Settings(compile=True), "no compiler"),
        (replace(CARD, capability=(6, 1)), Settings(compile=True), "Volta"),
        (replace(CARD, blocks=2), Settings(offload=True), "more than 2 blocks"),
        (Machine(torch.device("cpu"), blocks=12), Settings(offload=True), "runs on the CPU"),
    ],
)
def test_what_compile_and_offload_need(machine: Machine, settings: Settings, words: str) -> None:
    assert words in (refusal(machine, settings) or "")
    assert refusal(CARD, settings) is None


def test_the_readme_says_of_each_technique_whether_the_numbers_are_equal_and_how_far_off() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8").splitlines()
    head = readme.index("| key | technique | values | changes the numbers? | equal to what, and how far off |")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme[head + 2 :]]
    for technique, (keys, _, _, changes, equal) in zip(TECHNIQUES, table[: len(TECHNIQUES)], strict=True):
        assert {key.strip("`") for key in keys.split()} >= {technique.key}
        assert changes.startswith("yes" if technique.effect == "numbers" else "no")
        assert any(word in equal for word in ("equal to the bit", "within"))
    assert table[len(TECHNIQUES)] == [""], "a row for each, and no more"
