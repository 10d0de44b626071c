"""C06 and C18: modules and parameters that tasks share, wherever their users run; losses that couple rows."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import Given, Layer, Part, Sample, Small, forced_fit, multi, random_samples, together

TOKENS, WIDTH = 7, 4


class Embed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Project(Part):
    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, TOKENS)
        self.out.weight = embed.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


class Language(Small):
    """A language model whose embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = Embed(), Layer(WIDTH, WIDTH)
        self.project = Project(self.embed)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        logits = self.project(self.body(self.embed(batch["ids"])))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
        self.log("loss", loss)
        return loss


def language_model() -> Any:
    torch.manual_seed(0)
    return multi({"words": Language()}, "adamw")


def language_data() -> Any:
    draw = torch.Generator().manual_seed(4)
    samples = [{"ids": torch.randint(0, TOKENS, (5,), generator=draw)} for _ in range(17)]
    return together(words=Given(samples, [4, 4, 4, 3, 2]))


class TiedOnce(Callback):
    """The optimizer lists no parameter twice; the state has the tied one under both names."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        names = {id(p): n for n, p in module.named_parameters(remove_duplicate=False)}
        listed = [names[id(p)] for g in trainer.optimizers[0].param_groups for p in g["params"]]
        state = trainer.strategy.lightning_module_state_dict()
        tied = [v for k, v in state.items() if k.endswith(("table.weight", "out.weight"))]
        assert len(listed) == len(set(listed)), f"listed twice: {listed}"
        if trainer.global_rank == 0:
            assert len(tied) == 2
            assert torch.equal(*tied)


def test_c06_tied_embedding_and_head() -> None:
    """N=4: the embedding on ranks 0 and 1, the head that shares its weight on 2 and 3; five AdamW steps."""
    groups = {"words/": (0, 1), "words/project": (2, 3)}
    ours = forced_fit(language_model, language_data, 4, groups, max_steps=5, callbacks=[TiedOnce()])
    assert_same_fit(ours, plain_fit(language_model, language_data, max_steps=5, callbacks=[TiedOnce()]))
    tied = "tasks.words.embed.table.weight"
    assert all(tied in step["parameters"] for fit in ours for step in fit.steps), "all four hold it"


class Regress(Small):
    """A head on an encoder that other tasks use too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, Layer(WIDTH, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.head(self.encoder(batch["x"])), batch["y"])
        self.log("loss", loss)
        return loss


def three_tasks() -> Any:
    torch.manual_seed(0)
    encoder = Layer(3, WIDTH)
    return multi({name: Regress(encoder) for name in "abc"}, "adamw", weights={"b": 0.5})


def three_data() -> Any:
    data = {name: Given(random_samples(20, 5 + k, x=(3,), y=(1,)), [4] * 5) for k, name in enumerate("abc")}
    return together(**data)


def test_c06_encoder_shared_by_three_tasks() -> None:
    """Groups {0,1}, {1,2} and {3}: one sum over the union, one optimizer entry, five AdamW steps."""
    groups = {"a/": (0, 1), "b/": (1, 2), "c/": (3,)}
    ours = forced_fit(three_tasks, three_data, 4, groups, max_steps=5, callbacks=[EncoderOnce()])
    assert_same_fit(ours, plain_fit(three_tasks, three_data, max_steps=5))


class EncoderOnce(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        encoder = module.tasks["a"].encoder.linear.weight
        groups = trainer.optimizers[0].param_groups
        assert sum(p is encoder for g in groups for p in g["params"]) == 1
        keys = [
            k for k in trainer.strategy.lightning_module_state_dict() if k.endswith("encoder.linear.weight")
        ]
        assert len(keys) == 3


class Bind(Small):
    """Two modalities bound by a symmetric contrastive loss over the whole batch."""

    def __init__(self, a: nn.Module, b: nn.Module, logit_scale: nn.Parameter) -> None:
        super().__init__()
        self.a, self.b, self.logit_scale = a, b, logit_scale

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        a, b = F.normalize(self.a(batch["a"]), dim=-1), F.normalize(self.b(batch["b"]), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        self.log("loss", loss)
        return loss


def bound(optimizer: str) -> Any:
    torch.manual_seed(0)
    image, scale = Layer(3, WIDTH), nn.Parameter(torch.tensor(1.2))
    tasks = {"text": Bind(image, Layer(2, WIDTH), scale), "audio": Bind(image, Layer(5, WIDTH), scale)}
    return multi(tasks, optimizer)


def bound_data() -> Any:
    """Batches of 6 and 5 rows, then of 1 and 4."""
    text, audio = random_samples(13, 6, a=(3,), b=(2,)), random_samples(14, 7, a=(3,), b=(5,))
    return together(text=Given(text, [6, 6, 1]), audio=Given(audio, [5, 5, 4]))


BOUND = {
    "one group of three": (3, {"text/": (0, 1, 2), "audio/": (2, 1, 0)}),
    "towers apart": (2, {"text/": (0,), "text/b": (1,), "audio/": (1,), "audio/a": (0, 1)}),
    "losses elsewhere": (3, {"text/": (0, 1), "text/loss": (2,), "audio/": (1, 2), "audio/loss": (0,)}),
    "a task each": (2, {"text/": (0,), "audio/": (1,)}),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", BOUND)
def test_c18_contrastive_losses_with_shared_encoder_and_scale(name: str, optimizer: str) -> None:
    """ImageBind-like: all weights and the temperature as with the unsplit batch."""
    devices, groups = BOUND[name]
    ours = forced_fit(lambda: bound(optimizer), bound_data, devices, groups, max_steps=3)
    reference = plain_fit(lambda: bound(optimizer), bound_data, max_steps=3)
    assert_same_fit(ours, reference)
    moved = reference.parameters["tasks.text.logit_scale"] - 1.2
    assert abs(float(moved)) > 1e-3, "the temperature is trained"
