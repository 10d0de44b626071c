"""Variants of a step: batches of another structure than the example's (an optional modality that is absent),
and other values of attributes that the step reads.

What a step does with ``{"image": None}`` is another trace than what it does with a tensor, so each structure
in which a task's batches come is captured when it is first seen, and placed where the first one's operators
and parameters are. All ranks run the same variant in an iteration: where some do not read a task's batches,
those that do tell them the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_spindle.capture import each_tensor, flatten
from lightning_spindle.capture.layout import layout_like, leaf_kind
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.program import follow, holders
from lightning_spindle.runtime.objects import broadcast_object
from lightning_spindle.runtime.rowloading import PartialBatch
from lightning_spindle.runtime.session import (
    TRAIN,
    Session,
    Step,
    StepExample,
    trainable_names,
    written_buffers,
)
from lightning_spindle.runtime.state import LocalisedOptimizer
from lightning_spindle.runtime.training import Programs
from lightning_spindle.runtime.transport import Transport, everyone

MOST_STRUCTURES = 16
"""Structures in which one task's batches may come: each is captured and kept, with an engine of its own."""

MOST_CAPTURES = 16
"""Captures of one structure, for values of attributes that the step reads."""

_SILENT, _UNKNOWN, _FIRST = 0, 1, 2  # what a rank says of a task: not read, unknown, number 0 and so on

Build = Callable[[StepExample], Step]
"""Captures and places a variant; a collective call."""


class Variants:
    """A step for each combination of the structures in which its tasks' batches come.

    Args:
        model: the whole model.
        main: the step for the example's structures, number 0 of every task.
        example: the example batches of ``main``.
        build: makes the others.
    """

    def __init__(
        self,
        model: nn.Module,
        main: Step,
        example: StepExample,
        build: Build,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._model, self._example, self._build = model, example, build
        self._transport, self._device = transport, device
        self._known = {task: [(example.batches[task], layout)] for task, layout in example.layouts.items()}
        self._now = dict.fromkeys(example.layouts, 0)
        self._steps = {tuple(self._now.values()): [main]}
        # Of other tasks every rank sees each whole batch itself.
        by_rows = example.by_rows & main.capture.layouts.keys()
        unseen = [task for task in self._known if main.hosts(task) != everyone(transport)]
        self._told = [task for task in unseen if task in example.varying - by_rows]
        self._fixed = by_rows | set(unseen) - set(self._told)

    def fitting(self, batches: Mapping[str, Any]) -> Step:
        """The step for these batches, the same on every rank; an idle task keeps its last structure.

        Where some rank does not read all tasks' batches this is a collective call.

        Raises:
            ValueError: rows of a new structure cannot be found without guessing, or there are too many.
        """
        codes = {task: self._code(task, batches.get(task)) for task in self._now}
        if self._told:
            self._tell(codes, batches)
        for task, code in codes.items():
            if code == _UNKNOWN and task in self._fixed:
                raise ValueError(
                    f"task {task}: a batch is of another structure than the example that was captured, which "
                    "Spindle does not expect where ranks read rows alone, nor under torch's default_collate; "
                    "give the loader a collate_fn of your own, and SpindleStrategy(row_loading=False)"
                )
            if code == _UNKNOWN:
                self._learn(task, batches[task])
                codes[task] = _FIRST + len(self._known[task]) - 1
        self._now |= {task: code - _FIRST for task, code in codes.items() if code != _SILENT}
        return self._current(tuple(self._now.values()))

    def _current(self, numbers: tuple[int, ...]) -> Step:
        """The step for structures and for the model's attributes as they are now."""
        steps = self._steps.setdefault(numbers, [])
        for step in steps:
            if not step.outdated(self._model):
                return step
        if len(steps) == MOST_CAPTURES:
            raise ValueError(
                f"attributes that the step reads have had more than {MOST_CAPTURES} values: "
                f"{', '.join(steps[-1].outdated(self._model))}. The step is captured anew for each; compute "
                "them in the step from the batch, or make them buffers (self.register_buffer)"
            )
        known = {task: self._known[task][number] for task, number in self._now.items()}
        steps.append(
            self._build(
                replace(
                    self._example,
                    batches={task: batch for task, (batch, _) in known.items()},
                    layouts={task: layout for task, (_, layout) in known.items()},
                )
            )
        )
        return steps[-1]

    def _code(self, task: str, batch: Any) -> int:
        if isinstance(batch, PartialBatch):
            batch = batch.batch
        if batch is None:
            return _SILENT
        leaves, spec = flatten(batch, self._known[task][0][1].lists)
        kinds = tuple(map(leaf_kind, leaves))
        for number, (_, layout) in enumerate(self._known[task]):
            if layout.spec == spec and (layout.kinds == kinds or not layout.kinds):
                return _FIRST + number
        return _UNKNOWN

    def _tell(self, codes: dict[str, int], batches: Mapping[str, Any]) -> None:
        """Every rank's codes of the told tasks become those of the ranks that read them (collective)."""
        table = torch.zeros(len(self._told), self._transport.size, dtype=torch.int64, device=self._device)
        for at, task in enumerate(self._told):
            table[at, self._transport.rank] = codes[task]
        self._transport.all_reduce(table, everyone(self._transport)).wait()
        for task, said in zip(self._told, table.tolist(), strict=True):
            reader = next((rank for rank, code in enumerate(said) if code != _SILENT), None)
            if reader is None:
                continue
            others = {code for code in said if code not in (_SILENT, said[reader])}
            if others:
                raise ValueError(f"task {task}: ranks drew batches of different structures")
            codes[task] = said[reader]
            if codes[task] == _UNKNOWN:
                lists = self._known[task][0][1].lists
                given = batches[task] if self._transport.rank == reader else None
                shared = broadcast_object(given, self._transport, self._device, reader)
                self._learn(task, each_tensor(lambda tensor: tensor.to(self._device), shared, lists))
                codes[task] = _FIRST + len(self._known[task]) - 1

    def _learn(self, task: str, batch: Any) -> None:
        if len(self._known[task]) == MOST_STRUCTURES:
            raise ValueError(
                f"task {task}: its batches come in more than {MOST_STRUCTURES} structures, each of which is "
                "captured by itself; give them fewer (what is absent as None, or as zeros with a mask)"
            )
        try:
            layout = layout_like(batch, self._known[task][0][1])
        except ValueError as e:
            raise ValueError(f"task {task}, a batch of another structure than the first: {e}") from e
        rank_zero_info(
            f"task {task}: batches of another structure, {_difference(self._known[task][0][1], layout)}"
        )
        self._known[task].append((each_tensor(torch.clone, batch, layout.lists), layout))


def _difference(first: BatchLayout, layout: BatchLayout) -> str:
    """What a structure has that the first has not, and the other way round."""
    kinds = [dict(zip(one.names, one.kinds, strict=True)) for one in (first, layout)]
    changed: Sequence[str] = [
        f"{name} is {kinds[1].get(name, 'absent')}"
        for name in dict.fromkeys([*kinds[0], *kinds[1]])
        if kinds[0].get(name) != kinds[1].get(name)
    ]
    return ", ".join(changed) or "built in another way"


def _hosts(main: Step, example: StepExample, task: str) -> tuple[int, ...]:
    """The ranks that read what a task of a variant needs: one loader's batches, or all loaders'."""
    loaders = [task] if task in example.layouts else list(example.layouts)
    ranks = set.intersection(*(set(main.hosts(loader)) for loader in loaders))
    if not ranks:
        raise ValueError(
            f"batches of this structure run as one operator, and no rank reads all of {', '.join(loaders)}"
        )
    return tuple(sorted(ranks))


def build(
    session: Session, name: str, example: StepExample, optimizers: Iterable[LocalisedOptimizer]
) -> Step:
    """A variant of the session's step ``name``, for batches like ``example``'s; a collective call.

    Its operators run where the session's own step has operators of their task, so that who reads which
    batches stays; ranks become holders of the parameters that they then use, with the optimizers' state.

    Raises:
        ValueError: ranks captured different graphs; an operator that would have to run on other ranks.
    """
    ground, state, main = session.ground, session.state, session.steps[name]
    complete = state.complete
    state.consolidate()
    captured = ground.capture(name, example)
    hosts = {task: _hosts(main, example, task) for task in captured.layouts}
    runs = follow(main.program.runs, ground.transport.size, main.capture.graph, captured.graph, within=hosts)
    for run in runs:
        if not set(run.devices) <= set(hosts[run.task]):
            raise ValueError(
                f"task {run.task}: {run.label} is new in batches of this structure, and has to run on ranks "
                f"{run.devices}, of which some do not read the task's batches; let the first batch have it"
            )
    held = holders([(runs, captured.graph)])
    held |= dict.fromkeys(captured.joining, everyone(ground.transport))
    before = state.grow(held, written_buffers(ground.model, {name: captured}, {name: runs}))
    if name == TRAIN:
        session.trained.update(captured.graph.parameter_map() | session.trained)
        if ground.shard_optimizer_state:
            state.share_out(session.trained.values())
    for optimizer in optimizers:
        optimizer.grow(before, ground.transport, ground.device)
    session.parameters.update({n: p for n, p in ground.model.named_parameters() if state.holds(n)})
    if not complete:
        state.localise()
    programs = Programs(runs, captured.graph, ground.transport.size, state, session.trained)
    trainable = trainable_names(ground.model) if name == TRAIN else None
    return ground.step(captured, programs, trainable, session.parameters, example.drawing)
