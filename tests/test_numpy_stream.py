"""numpy's global stream is exactly what it would be without us, whatever draws apart from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui3090 import numpy_stream

DRAWS: dict[str, Callable[[], float]] = {
    "uniform": lambda: float(numpy.random.rand()),
    "one of a pair": lambda: float(numpy.random.randn()),
    "integer": lambda: float(numpy.random.randint(100)),
    "many": lambda: float(numpy.random.rand(700).sum()),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    generator = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(generator)


def apart() -> list[float]:
    """What somebody else draws."""
    with numpy_stream.apart():
        numpy.random.seed(7)
        return [draw() for draw in DRAWS.values()]


@given(st.lists(st.sampled_from([*DRAWS, "apart", "read", "again"]), max_size=30), st.integers(0, 99))
def test_what_draws_apart_moves_nothing(steps: list[str], seed: int) -> None:
    """`again`: back to what was read last, as when a window is run again."""
    numpy.random.seed(seed)
    plain = numpy.random.RandomState(seed)
    expected = apart()
    read, told = numpy_stream.state(), plain.get_state()
    for step in steps:
        if step == "apart":
            assert apart() == expected
        elif step == "read":
            read, told = numpy_stream.state(), plain.get_state()
        elif step == "again":
            numpy_stream.restore(read)
            plain.set_state(told)
        elif step == "one of a pair":
            assert DRAWS[step]() == float(plain.randn())
        elif step == "uniform":
            assert DRAWS[step]() == float(plain.rand())
        elif step == "integer":
            assert DRAWS[step]() == float(plain.randint(100))
        else:
            assert DRAWS[step]() == float(plain.rand(700).sum())
    name, words, *rest = numpy_stream.state()
    its_name, its_words, *its_rest = plain.get_state()
    assert (name, rest) == (its_name, its_rest)
    assert (words == its_words).all()


def test_one_stream_apart_inside_another_leaves_that_as_it_was() -> None:
    expected = apart()
    with numpy_stream.apart():
        numpy.random.seed(7)
        drawn = []
        for draw in DRAWS.values():
            assert apart() == expected
            drawn.append(draw())
    assert drawn == expected


def test_a_failure_apart_leaves_the_stream_as_it_was() -> None:
    numpy.random.seed(3)
    expected = float(numpy.random.RandomState(3).rand())

    def fails() -> None:
        with numpy_stream.apart():
            numpy.random.seed(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert float(numpy.random.rand()) == expected


def test_another_generator_in_the_globals_place_is_put_back_too() -> None:
    numpy.random.set_bit_generator(numpy.random.PCG64(5))
    same = numpy.random.RandomState(numpy.random.PCG64(5))
    read = numpy_stream.state()
    first = float(same.rand())
    assert float(numpy.random.rand()) == first
    numpy_stream.restore(read)
    expected = apart()
    assert float(numpy.random.rand()) == first
    numpy.random.randn()
    same.randn()
    assert apart() == expected
    assert float(numpy.random.randn()) == float(same.randn())


def test_an_unmoved_stream_is_not_spelt_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy.random.seed(1)
    get_state, asked = numpy.random.get_state, []
    monkeypatch.setattr(numpy.random, "get_state", lambda: asked.append(1) or get_state())
    for _ in range(3):
        numpy_stream.state()
        apart()
    assert asked == [1]
    numpy.random.rand()
    numpy_stream.state()
    assert asked == [1, 1]
