"""Saves from elsewhere, damaged or made up: each is gone on from or refused in a sentence, without a traceback."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Train
from tests.test_saves import recipe, stopped_at
from tui3090.commands import Stop
from tui3090.records import State
from tui3090.savefolder import MODEL, NOTES, TRAINING, Notes, crc32

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 80, 10**6, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "",
    "x", "\x1b[31m", "\ud800", "[/]", "amp=bf16 accumulate=999999", "a" * 9000, [], [[]], [["head.weight"]], [[5]],
    {}, {"x": 1}, {"head.weight": [[4, 16], "float32"]}, {"head.weight": "x"}, {"head.weight": "nowhere"},
]  # fmt: skip
"""Values for any place of a save."""
TENSORS: list[Any] = [torch.zeros(0), torch.tensor(float("nan")), torch.ones(3, 4), torch.arange(5), torch.ones(16, 16)]
odd = st.sampled_from(ODD)
PARTS = ("optimizer", "scaler", "schedule", "scheduler", "data", "random", "beside", "extra", "rates")


def places(body: Any, depth: int = 4) -> list[tuple[Any, Any]]:
    """Every container in a nested body with each of its keys or indices."""
    inside = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    found = [(body, key) for key, _ in inside]
    return found + [place for _, value in inside for place in places(value, depth - 1)] if depth else found


def spoilt(data: st.DataObject, body: Any, values: list[Any]) -> Any:
    """A copy of a nested body in which some places are gone or hold something else."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        all_places = places(body)
        if not all_places:
            return body
        container, key = all_places[data.draw(st.integers(0, len(all_places) - 1))]
        if isinstance(container, dict) and data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = copy.deepcopy(values[data.draw(st.integers(0, len(values) - 1))])
    return body


def cut(data: st.DataObject, content: bytes) -> bytes:
    """A file's content, cut, doubled, in another order, or with bytes of its own changed."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    place = draw.randrange(len(content))
    match data.draw(st.sampled_from(["cut", "turned", "doubled", "flipped", "grown", "other"])):
        case "cut":
            return content[:place]
        case "turned":
            return content[place:] + content[:place]
        case "doubled":
            return content + content[place:]
        case "flipped":
            changed = bytearray(content)
            for _ in range(20):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            return bytes(changed)
        case "grown":
            return content[:place] + b"\xff" * 100_000 + content[place:]
        case _:
            others = [b"", b"\0" * 64, b"PK\x03\x04", b"\xff" * 8 + b"{}", b"[" * 100_000, b"{}", b"\x80\x02."]
            return draw.choice(others)


def fitting(save: Path) -> None:
    """Write the sizes and checksums of the files as they are now into save.json, where that is an object."""
    body = json.loads((save / NOTES).read_text())
    body["files"] = {name: [(save / name).stat().st_size, crc32(save / name)] for name in (MODEL, TRAINING)}
    (save / NOTES).write_text(json.dumps(body))


@pytest.fixture
def resumed(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[Callable[[Path], None]], str]:
    """Spoils a copy of a save, goes on from it, and gives the sentence with which that was refused, or nothing."""
    stopped_at(train, tmp_path / "whole", 4)

    def resume(spoil: Callable[[Path], None]) -> str:
        folder = tmp_path / "spoilt"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        spoil(folder / "saves" / "step-00000004")
        capfd.readouterr()
        ran = train(recipe(), {1: [Stop()]}, folder=folder, resume=True)
        last = ran.records[-1]
        assert isinstance(last, State)
        assert "Traceback" not in capfd.readouterr().err, last
        if ran.status == 0:
            assert last.state in ("stopped", "finished"), last
            return ""
        assert (ran.status, last.state) == (2, "failed"), last
        assert 20 < len(last.detail) < 2000
        return last.detail

    return resume


fuzzed = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


@given(changes=st.dictionaries(st.sampled_from([f.name for f in fields(Notes) if f.name != "files"]), odd, min_size=1))
@fuzzed
def test_any_save_json_is_gone_on_from_or_refused(resumed: Callable[..., str], changes: dict[str, Any]) -> None:
    def spoil(save: Path) -> None:
        (save / NOTES).write_text(json.dumps({**json.loads((save / NOTES).read_text()), **changes}))

    resumed(spoil)


@given(data=st.data())
@settings(fuzzed, max_examples=25)
def test_any_state_of_training_is_gone_on_from_or_refused(resumed: Callable[..., str], data: st.DataObject) -> None:
    def spoil(save: Path) -> None:
        body = torch.load(save / TRAINING, weights_only=True)
        part = data.draw(st.sampled_from(PARTS))
        if part in body and data.draw(st.booleans()):
            body[part] = spoilt(data, body[part], [*ODD, *TENSORS])
        else:
            body[part] = data.draw(st.sampled_from([*ODD, *TENSORS]))
        torch.save(body, save / TRAINING)
        fitting(save)

    resumed(spoil)


@given(data=st.data(), name=st.sampled_from([MODEL, TRAINING, NOTES]), fits=st.booleans())
@fuzzed
def test_any_bytes_of_a_save_are_gone_on_from_or_refused(
    resumed: Callable[..., str], data: st.DataObject, name: str, fits: bool
) -> None:
    def spoil(save: Path) -> None:
        (save / name).write_bytes(cut(data, (save / name).read_bytes()))
        if fits and name != NOTES:
            fitting(save)

    resumed(spoil)


@given(data=st.data())
@settings(fuzzed, max_examples=20)
def test_any_tensors_are_gone_on_from_or_refused(resumed: Callable[..., str], data: st.DataObject) -> None:
    def spoil(save: Path) -> None:
        tensors = safetensors.torch.load_file(save / MODEL)
        safetensors.torch.save_file(spoilt(data, tensors, TENSORS), save / MODEL)
        fitting(save)

    assert "can't be read" in resumed(spoil)
