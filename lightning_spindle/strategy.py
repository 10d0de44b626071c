"""``SpindleStrategy``: Lightning's hooks, mapped to the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.runtime import checks, feeding, planning, variants
from lightning_spindle.runtime.clipping import clipping_together
from lightning_spindle.runtime.finetuning import completed_for_finetuning
from lightning_spindle.runtime.hints import warn_before_fit
from lightning_spindle.runtime.loaders import TaskLoader
from lightning_spindle.runtime.looking import Gradients
from lightning_spindle.runtime.objects import require_agreement
from lightning_spindle.runtime.outcome import Outcome, outcome_of
from lightning_spindle.runtime.outputs import require_expected
from lightning_spindle.runtime.preparing import Settings, prepare, seed_alike
from lightning_spindle.runtime.processes import ProcessStrategy
from lightning_spindle.runtime.recording import Recording
from lightning_spindle.runtime.replay import keep_metrics_local, restore_metrics
from lightning_spindle.runtime.rowneeds import Needs
from lightning_spindle.runtime.session import TRAIN, Session, Step, StepExample
from lightning_spindle.runtime.sharding import ShardedStep
from lightning_spindle.runtime.skipping import SKIPPED, allow_skipping, end_skipping
from lightning_spindle.runtime.state import LocalisedModel, LocalisedOptimizer
from lightning_spindle.runtime.training import Training
from lightning_spindle.runtime.transport import ProcessGroupTransport


class SpindleStrategy(ProcessStrategy):
    """Trains a multi-task model by an execution plan instead of by plain data parallelism.

    The model is a ``MultiTaskModule``, or any LightningModule: of several loaders in a dict, each is a task.

    Losses, gradients and logged values are those of one process on the same global batches:
    every rank draws every task's whole batch, reads the rows that its operators need, runs the
    operators that the plan gives it on its rows, and sums gradients with the ranks that hold the
    same parameters.

    Args:
        planner: name of the planner ("spindle" is the paper's); "auto" takes the one whose plan the
            simulator finds fastest for this model and these devices, and says so.
        plan: a plan to use instead of planning, or the path of its JSON file: that of an earlier run, by
            ``strategy.plan.to_json()``. Nothing is measured then, and no iteration predicted.
        operators: module classes to treat as one operator each, whatever is inside.
        profile_budget_s: about how long operators and links may be measured before training. One pass of
            each task is always made, and planning comes on top.
        timeout: limit of every wait for another rank.
        row_loading: whether a rank reads from a dataset only the rows of each batch that its operators
            need, instead of the whole batch. None does so for loaders that collate by torch's
            ``default_collate``, True also for other collate functions, which must treat each row by itself.
            Where a trial before training finds that rows cannot be read alone, and where hooks of the
            model, a task or the datamodule see batches, whole ones are read as under False: by the ranks
            that run an operator of the task. Callbacks do not count: in one, taking a value from a batch
            that was read in part is an error.
        shard_optimizer_state: of the devices that hold a parameter one keeps its optimizer state, steps it
            and gives the others its new values (ZeRO stage 1 within each parameter device group): less
            memory, for a broadcast of the parameters in each step.
        timeline: after fit, write ``timeline.json`` and ``timeline.png`` (predicted and measured
            iteration, a row a device) into the Trainer's ``default_root_dir``.
        process_group_backend: "gloo" on CPU and "nccl" on CUDA where None.

    Raises:
        ValueError: no planner has the name, or the plan's file cannot be read or holds no plan.
    """

    strategy_name = "spindle"

    def __init__(
        self,
        planner: str = planning.AUTO,
        plan: ExecutionPlan | str | Path | None = None,
        *,
        operators: tuple[type[nn.Module], ...] = (),
        profile_budget_s: float = 30.0,
        timeout: timedelta = timedelta(minutes=10),
        row_loading: bool | None = None,
        shard_optimizer_state: bool = False,
        timeline: bool = True,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            timeout,
            process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        planning.require_planner(planner)
        self._settings = Settings(
            planner, planning.load_plan(plan), operators, profile_budget_s, row_loading, shard_optimizer_state
        )
        self._plan = self._settings.plan
        self._by_rows: dict[str, frozenset[str]] = {}
        self._compared: dict[str, list[str]] = {}
        self._session: Session | None = None
        self._localised: dict[int, LocalisedOptimizer] = {}
        self._training: Training | None = None
        self._gradients: Gradients | None = None
        self._variants: dict[str, variants.Variants] = {}
        self._undo = ExitStack()
        self._sync = True
        self._stepping = False
        self._outcome: Outcome | None = None
        self._iteration: Any = None
        self._timeline = timeline
        self._recording: Recording | None = None

    @property
    def plan(self) -> ExecutionPlan | None:
        """The plan that training runs by, also after it; before, the one that was given or None."""
        return self._plan

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``tensor`` as it is, as in one process: every rank has the values of the whole batch.

        Outside of steps all ranks call it, with the same values.

        Raises:
            ValueError: on every rank, where ranks have unlike values.
        """
        if not self._stepping:
            given = f"{tensor.shape} {tensor.dtype} {tensor.tolist()}"
            require_agreement("what self.all_gather was given", given, self._transport, self.root_device)
        return tensor

    # -------------------------------------------------------------------- set-up

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        assert self.lightning_module is not None
        checks.require_supported(trainer, self.lightning_module, self.world_size)
        self._undo.enter_context(self._signals_put_off(trainer))
        super().setup(trainer)
        allow_skipping(trainer)
        self._undo.callback(end_skipping, trainer)
        for optimizer in self.optimizers:
            checks.require_separable(optimizer)
        self._undo.enter_context(completed_for_finetuning(trainer.callbacks, self._complete))

    def process_dataloader(self, dataloader: object) -> object:
        """Wraps a task's loader so that each rank reads the samples that its operators need."""
        # Loaders of an evaluation are asked for inside inference mode, whose tensors training cannot use.
        with torch.inference_mode(False), torch.enable_grad():
            self._prepare()
        return TaskLoader(dataloader, self._rows_to_read, self.precision_plugin.convert_input)

    def _rows_to_read(self, loader: TaskLoader) -> Needs | None:
        assert self._session is not None
        return feeding.rows_to_read(self.lightning_module.trainer, loader, self._session, self._by_rows)

    def _prepare(self) -> None:
        """Builds the session once a run: loaders are there, no batch was drawn yet."""
        if self._session is not None:
            return
        model = self.lightning_module
        assert model is not None
        seed = seed_alike(self._transport, self.root_device)
        self._settings.require_agreement(self._transport, self.root_device)
        with isolate_rng(), self.precision_plugin.forward_context(), self._inside_a_step():
            examples, self._session = prepare(self, self._settings, self._transport, seed)
        self._by_rows = {name: example.by_rows for name, example in examples.items()}
        # What user code collates may have other shapes for other rows.
        self._compared = {name: sorted(e.by_rows & e.varying) for name, e in examples.items()}
        self._variants = {
            name: variants.Variants(
                model, step, examples[name], partial(self._variant, name), self._transport, self.root_device
            )
            for name, step in self._session.steps.items()
        }
        if TRAIN in self._session.steps:
            checks.require_no_gradient_hooks(model)
            warn_before_fit(model, self._session.steps[TRAIN].capture.graph, self.optimizers)
        self._localise()
        self._undo.callback(restore_metrics, model, keep_metrics_local(model))
        planned = self._session.planned
        if planned is not None:
            self._plan = planned.plan
            self._recording = Recording(self._session.steps[TRAIN], planned.costs)
            planning.announce(
                planned.plan, self._session.steps[TRAIN].program, planned.costs, self._recording.predicted
            )
        self._look_for_signals()

    def _localise(self) -> None:
        assert self._session is not None
        state = self._session.state
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            names = {id(p): n for n, p in self.lightning_module.named_parameters()}
            # Kept until the next fit: a checkpoint may be saved after this one.
            self._localised = {id(o): LocalisedOptimizer(o, state, names) for o in self.optimizers}
            for optimizer in self._localised.values():
                optimizer.localise()
            self._training = Training(self.lightning_module, self._localised)
            if self.world_size > 1:
                self._step_apart(state)
        state.localise()

    def _step_apart(self, state: LocalisedModel) -> None:
        """For the fit, has optimizers and clipping work with a part of the gradients on each rank."""
        transport, device = self._transport, self.root_device
        self._gradients = Gradients(state, list(self._localised.values()), transport, device)
        self._undo.callback(self._gradients.end)
        if self._settings.shard_optimizer_state:
            for o in self.optimizers:
                self._undo.callback(ShardedStep(o, self._localised[id(o)].steps, self._share).end)
        self._undo.enter_context(clipping_together(self.precision_plugin, state, transport, device))

    # --------------------------------------------------------------------- steps

    def on_train_start(self) -> None:
        checks.require_no_gradient_hooks(self.lightning_module)  # those that came since the set-up

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """All tasks' forwards; what it returns seeds the engine's backward."""
        assert self._training is not None
        if self._gradients is not None:
            self._gradients.own_groups()  # also where user code did not step
        self._training.follow(self.optimizers)
        self._outcome, self._iteration = self._forward(
            TRAIN, batch, args, kwargs, self.precision_plugin.train_step_context()
        )
        if self._outcome.output is None:
            self._skip()
            return SKIPPED
        return self._outcome.output

    def _skip(self) -> None:
        """Lightning calls no backward without a loss; earlier steps of the window may wait to be summed."""
        if self._sync and self.lightning_module.trainer.accumulate_grad_batches > 1:
            if self._gradients is not None:
                self._gradients.hide()
            self._running.engine.backward(self._iteration, {}, sync=True)
        self._show_gradients()
        self._outcome = self._iteration = None

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", batch, args, kwargs, self.precision_plugin.val_step_context()
        )

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", batch, args, kwargs, self.precision_plugin.test_step_context())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "SpindleStrategy does not predict yet: load the checkpoint under another strategy to predict"
        )

    def _evaluate(self, name: str, batch: Any, args: Any, kwargs: Any, context: Any) -> Any:
        assert self._session is not None
        if name not in self._session.steps:
            return {}  # no task of the model has the step
        return self._forward(name, batch, args, kwargs, context)[0].output

    def _forward(
        self, name: str, batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Any
    ) -> tuple[Outcome, Any]:
        assert self._session is not None
        batch_idx = kwargs.get("batch_idx", args[0] if args else 0)
        dataloader_idx = kwargs.get("dataloader_idx", args[1] if len(args) > 1 else 0)
        step = self._step(name, batch, dataloader_idx)
        require_expected(self.lightning_module.trainer, name, step.capture)
        batches, active = feeding.step_batches(self.lightning_module, step, batch, dataloader_idx)
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        layouts, transport, device = step.capture.layouts, self._transport, self.root_device
        if batch_idx == 0:
            length = feeding.epoch_length(self.lightning_module.trainer)
            checks.require_same_data(batches, list(layouts), length, transport, device)
        if compared := [task for task in self._compared[name] if task in layouts]:
            checks.require_same_shapes(batches, layouts, compared, transport, device)
        with context or nullcontext(), self._inside_a_step():
            iteration = step.engine.forward(batches, index=loop.total_batch_idx, batch_idx=batch_idx)
            # The ranks have agreed on the program by now; one for other parameters may need other groups.
            if isinstance(transport, ProcessGroupTransport):
                transport.prepare(step.program.groups())
            seed = step.engine.seed
            return outcome_of(self.lightning_module, step, iteration, active, device, seed), iteration

    @contextmanager
    def _inside_a_step(self) -> Iterator[None]:
        """Inside, code of a step may run on one rank alone."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _step(self, name: str, batch: Any, dataloader_idx: int) -> Step:
        """The step for batches of this structure and for what trains now."""
        assert self._session is not None
        own = feeding.loader_batches(self._session.steps[name], batch, dataloader_idx)
        step = self._variants[name].fitting(own)
        if name == TRAIN:
            assert self._training is not None
            step.follow(self._training)
            self._running = step
        return step

    def _variant(self, name: str, example: StepExample) -> Step:
        assert self._session is not None
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            isolate_rng(),
            self.precision_plugin.forward_context(),
        ):
            # Those of an earlier fit are kept for its checkpoints.
            optimizers = () if self._training is None else self._localised.values()
            return variants.build(self._session, name, example, optimizers)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The base method with the engine's backward and gradient sync where autograd's would end."""
        if self._gradients is not None:
            self._gradients.hide()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        self._engine_backward()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _engine_backward(self) -> None:
        assert self._session is not None
        assert self._outcome is not None
        seeds = self._outcome.seeds()
        self._running.engine.backward(self._iteration, seeds, sync=self._sync)
        self._show_gradients()
        self._outcome = self._iteration = None

    def _show_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.show() if self._sync else self._gradients.hide()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._recording is not None:
            self._recording.iteration_ended(self._running)
        return output

    def _share(self) -> None:
        self._running.engine.share()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate on each rank; they are summed at the window's end."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    # --------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._interrupted:
            return {}
        if self._session is None:
            return super().lightning_module_state_dict()
        self._meet("saving a checkpoint")
        return self._session.state.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._interrupted:
            return {}
        plain = getattr(optimizer, "_optimizer", optimizer)
        localised = self._localised.get(id(plain))
        if localised is None:
            return super().optimizer_state(optimizer)
        return localised.state_dict(self._transport, self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads rank 0's choice of file on every rank."""
        return super().load_checkpoint(self.broadcast(checkpoint_path), weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._interrupted:
            rank_zero_warn(f"{filepath} is not saved: after an error the ranks' parts of the model are apart")
            return
        if self._session is not None and self._session.planned is not None:
            checkpoint["lightning_spindle"] = {"plan": self._session.planned.plan.to_json()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Inside, this rank has all parameters with their current values.

        From a backward in which gradients were summed to the next it has all gradients too. Every rank must
        enter; changes made inside are kept by a parameter's holders.
        """
        if self._session is None:
            yield self.lightning_module
            return
        self._meet("strategy.full_model()")
        with self._session.state.completed() if self._gradients is None else self._gradients.completed():
            yield self.lightning_module

    @contextmanager
    def _complete(self) -> Iterator[None]:
        """Inside, every rank has the whole model and whole optimizers."""
        with self.full_model(), ExitStack() as stack:
            for optimizer in self._localised.values():
                stack.enter_context(optimizer.completed())
            yield

    # ----------------------------------------------------------------------- end

    def on_validation_start(self) -> None:
        # Training may have written buffers on one rank that validation reads on others.
        if self._session is not None:
            self._session.state.share_buffers()

    def on_validation_end(self) -> None:
        # And validation may have written some that training reads.
        self.on_validation_start()
        if self._session is not None and self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            self._session.state.consolidate()

    on_test_end = on_validation_end

    def on_train_end(self) -> None:
        """The model is complete on every rank after fit, as before it; the timeline is written."""
        if self._session is None:
            return
        self._session.state.consolidate()
        if self._recording is not None and self._timeline:
            folder = Path(self.lightning_module.trainer.default_root_dir)
            self._recording.write(folder, self._transport, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        if self._ending_together and self._session is not None:
            self._session.state.consolidate()
        apart = self._session is not None and not self._session.state.complete
        checks.add_hints(exception, apart and self.world_size > 1)
        super().on_exception(exception)

    def teardown(self) -> None:
        """No collective: it also runs on one rank alone, after an exception."""
        model = self.lightning_module
        self._undo.close()
        if self._session is not None and not self._session.state.complete:
            # A part of the model is elsewhere, and Lightning would move all of it to the CPU.
            self._lightning_module = None
        self._session = self._recording = self._outcome = self._iteration = None
        self._training = self._gradients = None
        self._variants = {}
        super().teardown()
        self._lightning_module = model
