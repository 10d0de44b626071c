"""The systems that a measured job trains under: Lightning's strategies, and Spindle's."""

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from lightning_spindle import SpindleStrategy

DATA_PARALLEL = frozenset({"ddp", "fsdp2", "deepspeed"})
"""Strategies whose processes each load a shard of every batch."""
STRATEGIES = ("single", "spindle", *sorted(DATA_PARALLEL))


def strategy_of(name: str, options: Mapping[str, Any], processes: int, planner: str = "") -> Any:
    """The Trainer's strategy.

    Args:
        name: one of STRATEGIES.
        options: its arguments.
        planner: of Spindle; empty for its own choice.

    Raises:
        ValueError: for another name.
    """
    match name:
        case "spindle":
            return SpindleStrategy(**options, **({"planner": planner} if planner else {}))
        case "ddp":
            return DDPStrategy(**options)
        case "fsdp2":
            return ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1, **options)
        case "deepspeed":
            return CPUDeepSpeedStrategy(**options)
        case "single":
            return "auto"
    raise ValueError(f"strategy {name!r} is none of {', '.join(STRATEGIES)}")


def callbacks_of(name: str) -> list[Callback]:
    """What a strategy needs beside it."""
    match name:
        case "fsdp2":
            return [NoScalars(), FullySharded()]
        case "deepspeed":
            return [NoScalars()]
    return []


class NoScalars(Callback):
    """Gives parameters without a dimension one: FSDP2 and DeepSpeed (0.19, broadcasting) take no others."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before the optimizers are made."""
        for parameter in pl_module.parameters():
            if parameter.ndim == 0:
                parameter.data = parameter.data.reshape(1)


class FullySharded(Callback):
    """Shards every layer of the tasks' lists, then what is left, by FSDP2 before the optimizers are made."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The strategy has made its mesh by now."""
        mesh = pl_module.device_mesh["data_parallel"]
        lists = [module for module in pl_module.modules() if isinstance(module, nn.ModuleList)]
        for layer in (layer for layers in lists for layer in layers):
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=mesh)
        fully_shard(pl_module, mesh=mesh)
        register_fsdp_forward_method(pl_module, "training_step")


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy on CPU processes, which Lightning refuses and DeepSpeed can do.

    Needs the extra ``deepspeed``.
    """

    def __init__(self, **options: Any) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # A batch of several tasks has no one size to log the speed by.
        super().__init__(logging_batch_size_per_gpu=1, **options)

    def setup_environment(self) -> None:
        """As the base class, without its demand for CUDA."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """As the base class, without looking at the devices' indices."""
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """As the base class, with the process's number for the device's index, which CPUs have not."""
        import deepspeed

        trained = [p for p in model.parameters() if p.requires_grad]
        engine, wrapped, _, _ = deepspeed.initialize(
            args=Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=trained,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped
