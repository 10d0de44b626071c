"""``MultiTaskDataModule``: every datamodule as if it were the Trainer's own."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from tests.support.ranks import run_ranks

HOOKS = ("prepare_data", "setup", "teardown", "state_dict", "load_state_dict", "on_exception")
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Numbers(L.LightningDataModule):
    """Items are their own index."""

    def __init__(self, rows: int, batch_size: int, shuffle: bool = False, held_out: bool = True) -> None:
        super().__init__()
        self.rows, self.batch_size, self.shuffle, self.held_out = rows, batch_size, shuffle, held_out

    def _loader(self, shuffle: bool = False) -> DataLoader[Any]:
        indices = torch.arange(float(self.rows))
        return DataLoader(TensorDataset(indices), batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self._loader(self.shuffle)


class Evaluated(Numbers):
    def val_dataloader(self) -> Any:
        return self._loader()

    def test_dataloader(self) -> Any:
        return self._loader()


class Recorded(Evaluated):
    """Records each call with what it knows of the run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace: list[tuple[Any, ...]] = []

    def _record(self, hook: str, *seen: Any) -> None:
        self.trace.append((hook, *seen, self.trainer.state.fn.value))

    def prepare_data(self) -> None:
        self._record("prepare_data")

    def setup(self, stage: str) -> None:
        self._record("setup", stage)

    def teardown(self, stage: str) -> None:
        self._record("teardown", stage)

    def state_dict(self) -> dict[str, Any]:
        self._record("state_dict")
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._record("load_state_dict", dict(state_dict))

    def on_exception(self, exception: BaseException) -> None:
        self._record("on_exception", repr(exception))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._record("on_before_batch_transfer", batch[0].tolist())
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self._record("transfer_batch_to_device", batch[0].tolist(), str(device))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._record("on_after_batch_transfer", batch[0].tolist())
        return [batch[0] + 100]


class Sees(L.LightningModule):
    """Keeps the rows of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[str, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((f"train {self.current_epoch}", batch[0].tolist()))
        return self.weight * batch[0].sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("validation", batch[0].tolist()))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("test", batch[0].tolist()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    base = {"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return L.Trainer(**{**base, **quiet, **options})


def ids(task: Sees, stage: str) -> list[int]:
    return [int(i) for kind, batch in task.seen for i in batch if kind == stage]


def _life(model: L.LightningModule, data: L.LightningDataModule, folder: Any) -> None:
    run = trainer()
    run.fit(model, datamodule=data)
    run.save_checkpoint(folder / "x.ckpt")
    run.test(model, datamodule=data, verbose=False)
    again = trainer(max_epochs=2)
    again.fit(model, datamodule=data, ckpt_path=folder / "x.ckpt")


def test_every_hook_is_called_as_for_the_only_datamodule(tmp_path: Any) -> None:
    alone, children = Recorded(5, 2), {"a": Recorded(5, 2), "b": Recorded(4, 2)}
    _life(Sees(), alone, tmp_path)
    model, data = MultiTaskModule({"a": Sees(), "b": Sees()}), MultiTaskDataModule(children)
    _life(model, data, tmp_path)
    assert {entry[0] for entry in alone.trace} >= {*HOOKS, *TRANSFERS} - {"on_exception"}
    assert children["a"].trace == alone.trace
    assert model.tasks["a"].seen[0] == ("train 0", [100.0, 101.0])
    assert children["b"].trainer is children["a"].trainer is data.trainer


def test_exceptions_are_forwarded() -> None:
    class Fails(Sees):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no")

    children = {"a": Recorded(5, 2), "b": Recorded(4, 2)}
    with pytest.raises(RuntimeError, match="no"):
        trainer().fit(MultiTaskModule({"a": Fails(), "b": Sees()}), MultiTaskDataModule(children))
    for child in children.values():
        assert [entry for entry in child.trace if entry[0] == "on_exception"] == [
            ("on_exception", "RuntimeError('no')", "fit")
        ]


def test_prepare_data_once_per_run_only_on_the_first_node() -> None:
    child = Recorded(5, 2)
    child.prepare_data_per_node = False
    data = MultiTaskDataModule({"a": child})

    class Node:
        node_rank = 1

    data.trainer = Node()
    data.prepare_data()
    assert child.trace == []


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("max_size_cycle", {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 0, 1]}),
        ("max_size", {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2]}),
        ("min_size", {"a": [0, 1, 2, 3], "b": [0, 1, 2]}),
    ],
)
def test_modes_of_training(mode: str, expected: dict[str, list[int]]) -> None:
    model = MultiTaskModule({"a": Sees(), "b": Sees()})
    trainer().fit(model, MultiTaskDataModule({"a": Numbers(5, 2), "b": Numbers(3, 2)}, mode=mode))
    assert {name: ids(task, "train 0") for name, task in model.tasks.items()} == expected


def test_evaluation_runs_side_by_side_over_each_row_once() -> None:
    model = MultiTaskModule({"a": Sees(), "b": Sees(), "c": Sees()})
    data = MultiTaskDataModule({"a": Evaluated(5, 2), "b": Evaluated(3, 2), "c": Numbers(3, 2)})
    run = trainer()
    run.fit(model, data)
    run.test(model, data, verbose=False)
    for stage in ("validation", "test"):
        seen = [ids(task, stage) for task in model.tasks.values()]
        assert seen == [list(range(5)), list(range(3)), []]


def test_without_any_evaluation_loader_there_is_no_evaluation() -> None:
    model = MultiTaskModule({"a": Sees()})
    data = MultiTaskDataModule({"a": Numbers(5, 2)})
    assert data.val_dataloader() == []
    trainer(num_sanity_val_steps=2).fit(model, data)
    assert ids(model.tasks["a"], "validation") == []


def test_wrong_use_is_refused_by_name() -> None:
    class Two(Numbers):
        def val_dataloader(self) -> Any:
            return [self._loader(), self._loader()]

    with pytest.raises(ValueError, match="at least one datamodule"):
        MultiTaskDataModule({})
    with pytest.raises(ValueError, match="task 'a': int is not a LightningDataModule"):
        MultiTaskDataModule({"a": 1})
    with pytest.raises(ValueError, match="mode 'sequential' is none of"):
        MultiTaskDataModule({"a": Numbers(2, 1)}, mode="sequential")
    with pytest.raises(ValueError, match="task 'a': val_dataloader gives 2 loaders"):
        MultiTaskDataModule({"a": Two(2, 1)}).val_dataloader()
    empty = {"a": Numbers(2, 1), "b": Numbers(0, 1)}
    with pytest.raises(ValueError, match="task 'b': its training loader has no batch"):
        MultiTaskDataModule(empty).train_dataloader()
    assert isinstance(MultiTaskDataModule(empty, mode="max_size").train_dataloader(), CombinedLoader)


def test_transfer_hooks_are_overridden_only_if_a_child_overrides_them(recwarn: Any) -> None:
    class Adds(Sees):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1000]

    assert "transfer_batch_to_device" not in vars(MultiTaskDataModule({"a": Numbers(2, 1)}))
    # a's datamodule and b's module override the hook: each task's batch goes through its own.
    model = MultiTaskModule({"a": Sees(), "b": Adds()})
    trainer().fit(model, MultiTaskDataModule({"a": Recorded(4, 2), "b": Numbers(4, 2)}))
    assert ids(model.tasks["a"], "train 0") == [100, 101, 102, 103]
    assert ids(model.tasks["b"], "train 0") == [1000, 1001, 1002, 1003]


# ------------------------------------------------------------------------------------------------ C07
def _epochs(rank: int = 0, world_size: int = 1, **options: Any) -> dict[str, list[list[int]]]:
    L.seed_everything(7)
    model = MultiTaskModule({"a": Sees(), "b": Sees()})
    data = MultiTaskDataModule(
        {"a": Numbers(13, 1, shuffle=True), "b": Numbers(10, 2, shuffle=True)}, "max_size"
    )
    trainer(max_epochs=2, **options).fit(model, data)
    return {name: [ids(task, f"train {epoch}") for epoch in range(2)] for name, task in model.tasks.items()}


def test_c07_each_row_once_per_epoch_in_another_order_every_epoch() -> None:
    for name, rows in (("a", 13), ("b", 10)):
        first, second = _epochs()[name]
        assert sorted(first) == sorted(second) == list(range(rows))
        assert first != second


def test_c07_under_ddp_the_ranks_share_the_rows_of_every_task() -> None:
    ranks = run_ranks(_epochs_under_ddp, 2)
    for name, rows in (("a", 13), ("b", 10)):
        epochs = [[i for rank in ranks for i in rank[name][epoch]] for epoch in range(2)]
        for epoch in epochs:
            assert set(epoch) == set(range(rows))
            assert len(epoch) == rows + rows % 2  # Lightning repeats rows to make the shares equal
        assert epochs[0] != epochs[1]


def _epochs_under_ddp(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    return _epochs(strategy="ddp_find_unused_parameters_true", devices=world_size)
