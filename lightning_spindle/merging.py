"""The tasks' optimizers and schedulers as one optimizer and one scheduler (docs/decisions/0002).

Automatic optimization takes one optimizer. Each task configures its own, as in a fit alone; the merged one
has every task's parameter groups in the tasks' order, and each shared parameter once.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_NOT_OPTIONS = ("params", "param_names", "name")


@dataclass(frozen=True, slots=True)
class TaskOptimizer:
    """What one task's ``configure_optimizers`` returned, in one form."""

    task: str
    optimizer: Optimizer
    schedulers: tuple[LRSchedulerConfig, ...]


def configured(name: str, task: LightningModule) -> TaskOptimizer | None:
    """Call the task's ``configure_optimizers``; None if the task has nothing to optimise.

    Raises:
        ValueError: for several optimizers, or a scheduler that waits for a metric.
    """
    result = task.configure_optimizers()
    if result is None:
        return None
    optimizers, schedulers, monitor = _configure_optimizers(result)
    if len(optimizers) != 1:
        raise ValueError(
            f"task {name!r}: configure_optimizers gave {len(optimizers)} optimizers, MultiTaskModule merges "
            "exactly one per task; give its parameter groups their own options instead"
        )
    configs = _configure_schedulers_automatic_opt(schedulers, monitor)
    for config in configs:
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"task {name!r}: {type(config.scheduler).__name__} waits for a metric and cannot be merged "
                "with other tasks' schedulers; override configure_optimizers in a MultiTaskModule subclass"
            )
    return TaskOptimizer(name, optimizers[0], tuple(configs))


def merge(parts: list[TaskOptimizer], names: Mapping[torch.nn.Parameter, str]) -> Any:
    """One optimizer (and scheduler) out of the tasks', in the form ``configure_optimizers`` returns.

    The merged groups are the tasks' groups in order, each with its own options. A parameter that several
    tasks list stays in the group of the first (its owner), the others' groups go without it. A group that
    loses all of its parameters so is left out: not every strategy (DeepSpeed) takes empty ones.

    Args:
        parts: in the order of the tasks.
        names: each parameter's name, for messages.

    Raises:
        ValueError: for optimizers of different classes, a shared parameter with different options, schedulers
            that step at different intervals.
    """
    if not parts:
        return None
    first = parts[0]
    for part in parts[1:]:
        if type(part.optimizer) is not type(first.optimizer):
            raise ValueError(
                f"tasks {first.task!r} and {part.task!r} configure optimizers of different classes, "
                f"{type(first.optimizer).__name__} and {type(part.optimizer).__name__}; they cannot merge"
            )
    _check_shared(parts, names)
    optimizer = _like(first.optimizer, _merged_groups(parts))
    configs = [(part, config) for part in parts for config in part.schedulers]
    if not configs:
        return optimizer
    owner, timing = configs[0]
    for part, config in configs[1:]:
        if (config.interval, config.frequency) != (timing.interval, timing.frequency):
            raise ValueError(
                f"schedulers of tasks {owner.task!r} and {part.task!r} step at different times: every "
                f"{timing.frequency} {timing.interval}(s) and every {config.frequency} {config.interval}(s)"
            )
    return {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": MergedScheduler(optimizer, parts),
            "interval": timing.interval,
            "frequency": timing.frequency,
        },
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _merged_groups(parts: list[TaskOptimizer]) -> list[dict[str, Any]]:
    merged = []
    for part, groups in zip(parts, _owned(parts), strict=True):
        for index, owned in groups.items():
            merged.append({**part.optimizer.param_groups[index], "params": owned})
            merged[-1].pop("param_names", None)
    return merged


def _owned(parts: list[TaskOptimizer]) -> list[dict[int, list[torch.nn.Parameter]]]:
    """For each task, the groups that the merged optimizer has, with parameters that no task before lists."""
    seen: set[torch.nn.Parameter] = set()
    kept: list[dict[int, list[torch.nn.Parameter]]] = []
    for part in parts:
        kept.append({})
        for index, group in enumerate(part.optimizer.param_groups):
            owned = [parameter for parameter in group["params"] if parameter not in seen]
            if owned or not group["params"]:
                kept[-1][index] = owned
            seen.update(owned)
    return kept


def _check_shared(parts: list[TaskOptimizer], names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raises ValueError where tasks give a parameter that they share different options."""
    owners: dict[torch.nn.Parameter, tuple[str, dict[str, Any]]] = {}
    for part in parts:
        for group in part.optimizer.param_groups:
            options = _options(group)
            for parameter in group["params"]:
                owner = owners.setdefault(parameter, (part.task, options))
                _check_same(names.get(parameter, "?"), owner, (part.task, options))


def _check_same(parameter: str, owner: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]) -> None:
    differing = [key for key in {**owner[1], **other[1]} if owner[1].get(key) != other[1].get(key)]
    if differing == ["initial_lr"] and None in (owner[1].get("initial_lr"), other[1].get("initial_lr")):
        with_one, without = (owner, other) if "initial_lr" in owner[1] else (other, owner)
        raise ValueError(
            f"parameter {parameter!r} is shared by tasks {owner[0]!r} and {other[0]!r}, of which "
            f"{with_one[0]!r} has a learning rate scheduler for it and {without[0]!r} none. Give both the "
            "same, or leave the parameter out of the optimizer of one"
        )
    if differing:
        values = "; ".join(f"{key} {owner[1].get(key)} and {other[1].get(key)}" for key in differing)
        raise ValueError(
            f"parameter {parameter!r} is shared by tasks {owner[0]!r} and {other[0]!r}, which give it "
            f"different options: {values}. Give it the same options in both, or leave it out of one"
        )


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and defaults over other groups."""
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    try:
        return type(optimizer)(groups, **defaults)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"tasks' optimizers of class {type(optimizer).__name__} cannot merge into one: it takes no "
            f"parameter groups with options of their own ({e}); use one that does, such as SGD or AdamW"
        ) from e


def _shared_groups(parts: list[TaskOptimizer]) -> list[tuple[TaskOptimizer, int, TaskOptimizer, int]]:
    """(owner, its group, other, its group) wherever two tasks' groups list the same parameter."""
    first: dict[torch.nn.Parameter, tuple[TaskOptimizer, int]] = {}
    shared: dict[tuple[str, int, str, int], tuple[TaskOptimizer, int, TaskOptimizer, int]] = {}
    for part in parts:
        for index, group in enumerate(part.optimizer.param_groups):
            for parameter in group["params"]:
                owner, owned = first.setdefault(parameter, (part, index))
                if owner is not part:
                    shared[owner.task, owned, part.task, index] = (owner, owned, part, index)
    return list(shared.values())


class MergedScheduler(LRScheduler):
    """Steps the tasks' schedulers, each on its own task's groups of the merged optimizer.

    Every scheduler stays attached to its task's own optimizer, which never steps. At each ``step`` the
    options of the merged groups go there, the scheduler steps, and the options come back. Groups are paired
    by position (loading a state replaces the group objects), and may have lost parameters since. Those that
    the merged optimizer has not keep their own options.
    """

    # No super().__init__(): it would take a first step and rewrite the groups.
    def __init__(self, optimizer: Optimizer, parts: list[TaskOptimizer]) -> None:
        self.optimizer = optimizer
        self.parts = parts
        self.last_epoch = 0
        self.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._last_lr = self.get_lr()
        self._shared = _shared_groups(parts)
        self._merged = [tuple(groups) for groups in _owned(parts)]

    def step(self, epoch: None = None) -> None:
        """Step every task's schedulers once (``epoch``, long deprecated in torch, is not supported)."""
        self.last_epoch += 1
        for part, pairs in self._pairs():
            for mine, merged in pairs:
                mine.update(_options(merged))
            # The private optimizer never steps: its scheduler would warn about the order of calls.
            part.optimizer._opt_called = True
            for config in part.schedulers:
                config.scheduler.step()
            for mine, merged in pairs:
                merged.update(_options(mine))
        self._last_lr = self.get_lr()
        self._warn_of_parting()

    def get_lr(self) -> list[Any]:
        """The rates of the merged groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state of each task's schedulers, by task."""
        tasks = {p.task: [config.scheduler.state_dict() for config in p.schedulers] for p in self.parts}
        return {"last_epoch": self.last_epoch, "tasks": tasks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over each task's state.

        Raises:
            ValueError: if a task's schedulers are missing from the state, or more or fewer than now.
        """
        for part in self.parts:
            states = state_dict["tasks"].get(part.task, [])
            if len(states) != len(part.schedulers):
                raise ValueError(
                    f"the scheduler state has {len(states)} schedulers for task {part.task!r}, "
                    f"the module has {len(part.schedulers)}"
                )
            for config, state in zip(part.schedulers, states, strict=True):
                config.scheduler.load_state_dict(state)
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()

    def _pairs(self) -> list[tuple[TaskOptimizer, list[tuple[dict[str, Any], dict[str, Any]]]]]:
        """Each task with its own groups beside the merged ones."""
        pairs, start = [], 0
        for part, indices in zip(self.parts, self._merged, strict=True):
            groups = [part.optimizer.param_groups[index] for index in indices]
            merged = self.optimizer.param_groups[start : start + len(groups)]
            pairs.append((part, list(zip(groups, merged, strict=True))))
            start += len(groups)
        return pairs

    def _warn_of_parting(self) -> None:
        """Warn once where a task's schedule leaves the owner's on a shared parameter: the owner's is used."""
        kept = []
        for owner, owned, part, index in self._shared:
            used = owner.optimizer.param_groups[owned]["lr"]
            unused = part.optimizer.param_groups[index]["lr"]
            if used == unused:
                kept.append((owner, owned, part, index))
            else:
                rank_zero_warn(
                    f"step {self.last_epoch}: task {part.task!r} schedules a learning rate of {unused} for "
                    f"parameters that it shares with task {owner.task!r}, which listed them first: "
                    f"its {used} is used"
                )
        self._shared = kept
