"""``MultiTaskDataModule``: several LightningDataModules that feed one ``MultiTaskModule``."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

_MODES = ("max_size_cycle", "max_size", "min_size")


class MultiTaskDataModule(LightningDataModule):
    """Gives ``{task: batch}``, one batch of every task's own datamodule per iteration.

    Every hook of every datamodule is called once per event, in order, with ``trainer`` set as in a fit of its
    own; transfer hooks get the task's own batch. In validation and test all loaders run side by side once
    (``max_size``): a task whose loader has ended gives None. A task without such a loader is left out.
    Predict loaders are not combined (Lightning's predict loop takes one loader after the other).

    Args:
        datamodules: task → datamodule.
        mode: of the training loaders (``CombinedLoader``): ``max_size_cycle`` starts a shorter loader again
            until the longest ends; ``max_size`` leaves its task idle (None); ``min_size`` ends with the
            shortest.
    """

    def __init__(self, datamodules: Mapping[str, LightningDataModule], mode: str = "max_size_cycle") -> None:
        if not datamodules:
            raise ValueError("MultiTaskDataModule needs at least one datamodule")
        for name, child in datamodules.items():
            if not isinstance(child, LightningDataModule):
                raise ValueError(f"task {name!r}: {type(child).__name__} is not a LightningDataModule")
        if mode not in _MODES:
            raise ValueError(f"mode {mode!r} is none of {_MODES}")
        self.datamodules = dict(datamodules)
        self.mode = mode
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = any(
            child.allow_zero_length_dataloader_with_multiple_devices for child in self.datamodules.values()
        )
        self._take_over_transfer_hooks()

    @property
    def trainer(self) -> Any:
        """The Trainer, known to every datamodule too."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        for child in self.datamodules.values():
            child.trainer = trainer

    # -------------------------------------------------------------------------------------------- the run
    def prepare_data(self) -> None:
        """Forward, to ``prepare_data_per_node=False`` datamodules on the first node only."""
        for child in self.datamodules.values():
            if child.prepare_data_per_node or self.trainer is None or self.trainer.node_rank == 0:
                child.prepare_data()

    def setup(self, stage: str) -> None:
        """Forward ``setup``."""
        for child in self.datamodules.values():
            child.setup(stage)

    def teardown(self, stage: str) -> None:
        """Forward ``teardown``."""
        for child in self.datamodules.values():
            child.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """Forward ``on_exception``."""
        for child in self.datamodules.values():
            child.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """Task → state, of the datamodules that have one."""
        states = {name: child.state_dict() for name, child in self.datamodules.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand each datamodule the state it saved; datamodules that saved none are left alone."""
        for name, child in self.datamodules.items():
            if name in state_dict:
                child.load_state_dict(state_dict[name])

    # ------------------------------------------------------------------------------------------- loaders
    def train_dataloader(self) -> CombinedLoader:
        """The tasks' training loaders side by side.

        Raises:
            ValueError: for a loader without batches in a mode where it would silently end every epoch.
        """
        loaders = self._loaders("train_dataloader")
        for name, loader in loaders.items():
            if self.mode != "max_size" and sized_len(loader) == 0:
                raise ValueError(
                    f"task {name!r}: its training loader has no batch, so with mode {self.mode!r} no "
                    "task would ever train; remove the task or use mode 'max_size'"
                )
        return CombinedLoader(loaders, self.mode)

    def val_dataloader(self) -> Any:
        """The tasks' validation loaders side by side; an empty list if no task has one."""
        return self._evaluation_loader("val_dataloader")

    def test_dataloader(self) -> Any:
        """The tasks' test loaders side by side; an empty list if no task has one."""
        return self._evaluation_loader("test_dataloader")

    def _evaluation_loader(self, hook: str) -> Any:
        loaders = self._loaders(hook)
        return CombinedLoader(loaders, "max_size") if loaders else []

    def _loaders(self, hook: str) -> dict[str, Any]:
        loaders = {}
        for name, child in self.datamodules.items():
            if not is_overridden(hook, child):
                continue
            loader = getattr(child, hook)()
            if isinstance(loader, (list, tuple)):
                raise ValueError(
                    f"task {name!r}: {hook} gives {len(loader)} loaders, one per task is supported"
                )
            loaders[name] = loader
        return loaders

    # ---------------------------------------------------------------------------------------- transfers
    # Lightning uses the datamodule's transfer hooks if it overrides them, else the module's: so this one
    # overrides a hook exactly when one of its datamodules does.
    def _take_over_transfer_hooks(self) -> None:
        forwards = {
            "on_before_batch_transfer": self._before_transfer,
            "transfer_batch_to_device": self._transfer,
            "on_after_batch_transfer": self._after_transfer,
        }
        for hook, forward in forwards.items():
            overridden = any(is_overridden(hook, child) for child in self.datamodules.values())
            if overridden and not is_overridden(hook, self):
                setattr(self, hook, forward)

    def _before_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._each(batch, "on_before_batch_transfer", dataloader_idx)

    def _transfer(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self._each(batch, "transfer_batch_to_device", device, dataloader_idx)

    def _after_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._each(batch, "on_after_batch_transfer", dataloader_idx)

    def _each(self, batch: dict[str, Any], hook: str, *args: Any) -> dict[str, Any]:
        return {
            name: None if own is None else getattr(self._owner(name, hook), hook)(own, *args)
            for name, own in batch.items()
        }

    def _owner(self, name: str, hook: str) -> Any:
        """Whose hook a task's batch goes through: its datamodule's, or its module's if only that has one."""
        child = self.datamodules[name]
        module = getattr(self.trainer, "lightning_module", None)
        task = dict(getattr(module, "tasks", {})).get(name)
        return task if task is not None and not is_overridden(hook, child) else child
