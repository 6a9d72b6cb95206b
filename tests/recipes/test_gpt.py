"""The bundled GPT: its data, its shapes, and that it learns."""

import math
from pydoc_data.topics import topics

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from tui3090.recipe import tokens_in, weigh
from tui3090.recipes.gpt import GPT, PROMPT, SIZES, WRITTEN, Windows, loss, metrics, recipe, write


@pytest.fixture(autouse=True)
def _seeded_on_one_thread():
    """On one thread, because two that wait for each other crawl on a busy machine."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_windows_cover_the_text_and_labels_are_the_next_bytes():
    text = bytes(range(256)) * 2
    windows = Windows(text, 100)
    assert len(windows) == 5
    assert torch.cat([window["input_ids"] for window in windows]).tolist() == list(text[:500])
    assert torch.cat([window["labels"] for window in windows]).tolist() == list(text[1:501])


def test_train_and_eval_text_do_not_overlap():
    made = recipe(context=64)
    text = "\n".join(topics.values()).encode()
    assert bytes(made.train_data.text) + bytes(made.eval_data.text) == text
    assert len(made.eval_data.text) == pytest.approx(len(text) / 10, abs=1)


def test_a_batch_weighs_its_bytes():
    made = recipe()
    batch = default_collate([made.train_data[0], made.train_data[1]])
    assert weigh(made, batch) == tokens_in(batch) == 2 * 128


@pytest.mark.parametrize(
    ("name", "parameters"), [("small", 842_496), ("gpt2", 124_475_904), ("gpt2-medium", 354_871_296)]
)
def test_parameters_of_each_size(name, parameters):
    size = SIZES[name]
    with torch.device("meta"):
        model = GPT(size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    d = size.width  # a block: 4 d² + 8 d² of weights, 4 d + 5 d of biases, 4 d of norms
    block = 12 * d * d + 13 * d
    assert parameters == (size.vocabulary + size.context) * d + size.layers * block + 2 * d


def test_the_model_does_not_see_what_it_predicts():
    model = GPT(SIZES["small"])
    ids = torch.randint(256, (1, 20))
    changed = ids.clone()
    changed[0, 12] += 1
    with torch.no_grad():
        difference = (model(ids) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:12].max() < 1e-5
    assert difference[12:].min() > 1e-5


def test_it_starts_at_chance_and_learns():
    made = recipe()
    optimizer = made.optimizer(made.model)
    losses = []
    for batch, _ in zip(DataLoader(made.train_data, 8, shuffle=True), range(60)):
        value = made.loss(made.model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert sum(losses[-5:]) / 5 < 3.1


def test_dropout_drops_in_training_only():
    made = recipe(dropout=0.5)
    batch = default_collate([made.eval_data[0]])
    assert loss(made.model, batch) != loss(made.model, batch)
    made.model.eval()
    assert loss(made.model, batch) == loss(made.model, batch)


def test_metrics_are_bits_per_byte_and_a_text_and_leave_the_random_stream_alone():
    made = recipe(context=16)
    batches = [default_collate([made.eval_data[0], made.eval_data[1]]), default_collate([made.eval_data[2]])]
    made.model.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        figures = metrics(made.model, iter(batches))
        whole = loss(made.model, default_collate([made.eval_data[i] for i in range(3)]))
    assert torch.equal(torch.get_rng_state(), state)
    assert figures["bits per byte"] == pytest.approx(whole.item() / math.log(2), rel=1e-5)
    assert figures["wrote"].startswith(PROMPT)


def test_it_writes_bytes_only_and_the_same_again():
    model = GPT(SIZES["small"]).eval()
    with torch.no_grad():
        text = write(model)
        assert write(model) == text
    assert len(text.encode("utf-8", "replace")) >= len(PROMPT) + WRITTEN  # a byte that is no text becomes three


def test_options_take_the_place_of_the_sizes_own_values():
    made = recipe(batch_size=4, context=32, lr=0.5, epochs=3)
    assert (made.batch_size, made.epochs, made.model.context) == (4, 3, 32)
    assert made.optimizer(made.model).param_groups[0]["lr"] == 0.5
