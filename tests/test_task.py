"""``SpindleTask``: flows, alone and in a multi-task model; ``inspect``."""

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightning_spindle
from lightning_spindle import MultiTaskModule, SpindleTask
from tests.support import toys, ways
from tests.support.fitting import assert_same_fit, plain_fit, spindle_fit


def classify(encoder: nn.Module) -> SpindleTask:
    task = SpindleTask(partial(torch.optim.AdamW, lr=0.01))
    features = task.add_flow(encoder, "x", lengths="length", name="encoder")
    logits = task.add_flow(nn.Linear(toys.WIDTH, toys.CLASSES), features)
    task.add_flow(F.cross_entropy, logits, target="label")
    return task


def pair(encoder: nn.Module, text: nn.Module) -> SpindleTask:
    task = SpindleTask(partial(torch.optim.AdamW, lr=0.01))
    a = task.add_flow(encoder, "x", "length", name="encoder")
    b = task.add_flow(text, "text", "text_length", name="text")
    both = task.add_flow(lambda a, b: {"pair": (a, b)}, a, b, name="both")
    task.add_flow(F.mse_loss, both["pair"][0], both["pair"][1])
    return task


def model() -> MultiTaskModule:
    torch.manual_seed(0)
    image, text = toys.Encoder(5, 3), toys.Encoder(4)
    return MultiTaskModule(
        {
            "image_text": pair(image, text),
            "audio_text": pair(toys.Encoder(3), text),
            "image_class": classify(image),
        }
    )


def one_task() -> SpindleTask:
    torch.manual_seed(0)
    return classify(toys.Encoder(5))


@functools.cache
def reference(make: Any, data: Any) -> Any:
    return plain_fit(make, data)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_flows_of_several_tasks(devices: int) -> None:
    assert_same_fit(spindle_fit(model, toys.data, devices), reference(model, toys.data))


def one_data() -> toys.Data:
    return toys.Data(13, 6, 5, seed=1)


def test_a_task_alone() -> None:
    assert_same_fit(spindle_fit(one_task, one_data, 2), reference(one_task, one_data))


def test_operators_are_the_users_modules() -> None:
    found = lightning_spindle.inspect(one_task(), one_data())
    names = [o.name for o in found.capture.graph.operators]
    assert names == [
        "task/flows.encoder.stem",
        "task/flows.encoder.blocks.0",
        "task/flows.encoder.blocks.1",
        "task/flows.encoder.norm",
    ]
    whole = lightning_spindle.inspect(one_task(), one_data(), operators=(toys.Encoder,))
    assert next(o.name for o in whole.capture.graph.operators) == "task/flows.encoder"


def test_state_dict_names_flows() -> None:
    assert "flows.encoder.stem.weight" in one_task().state_dict()
    assert "flows.linear.weight" in one_task().state_dict()


def test_flows_that_are_refused() -> None:
    task, other = SpindleTask(), SpindleTask()
    flow = other.add_flow(nn.Linear(2, 2), "x", name="foreign")
    with pytest.raises(ValueError, match="'foreign' is not of this task"):
        task.add_flow(nn.Linear(2, 2), flow)
    with pytest.raises(ValueError, match="needs a source"):
        task.add_flow(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'foreign': names are unique"):
        other.add_flow(nn.Linear(2, 2), "x", name="foreign")
    with pytest.raises(ValueError, match="no flows"):
        task.training_step({}, 0)
    with pytest.raises(ValueError, match="optimizer"):
        task.configure_optimizers()


# ------------------------------------------------------------------------------------------------ inspect
def test_inspect_shows_tasks_operators_and_flows() -> None:
    shown = str(lightning_spindle.inspect(toys.model(), toys.data()))
    for part in ("task image_text: 6 rows", "MetaOp image_text/", "[6, 8]", "image_text/loss (whole"):
        assert part in shown, shown
    text = str(lightning_spindle.inspect(ways.Weighted(), ways.SharedData()))
    assert "task a: 6 rows" in text
    assert "loss with a, b: from scalars of a, b" in text


def test_inspect_takes_a_batch_and_leaves_all_as_it_was() -> None:
    made, batch = ways.Alone(), (torch.randn(6, toys.WIDTH), torch.randint(3, (6,)))
    before = {k: v.clone() for k, v in made.state_dict().items()}
    state = torch.get_rng_state()
    found = lightning_spindle.inspect(made, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert [o.name for o in found.capture.graph.operators][:2] == ["task/blocks.0", "task/blocks.1"]
    assert all(torch.equal(v, before[k]) for k, v in made.state_dict().items())


def test_inspect_says_what_was_not_taken_apart() -> None:
    found = lightning_spindle.inspect(ways.Mixed(), ways.SharedData())
    assert any("only scalars can be joined" in reason for reason in found.reasons)
    assert "not taken apart: task 'a+b'" in str(found)
