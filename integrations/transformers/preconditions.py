"""What a `Trainer` must be like, and the messages if it is not."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from dlrover_hooks.config import Config
from dlrover_hooks.data.leased.leased_loader import is_leased
from dlrover_hooks.data.loader import supports
from dlrover_hooks.errors import UsageError
from dlrover_hooks.pytorch.tensor_loading import left_alone

_SUPPORTED = {"NO", "MULTI_CPU", "MULTI_GPU"}


def stand_aside(trainer: Trainer, config: Config) -> str | None:
    """Why the hooks do nothing; None if they do. Raises UsageError for what cannot work."""
    accelerator: Any = trainer.accelerator
    if config.disable:
        return "DLROVER_HOOKS_DISABLE is set"
    strategy = accelerator.distributed_type.value
    if strategy not in _SUPPORTED or getattr(trainer, "is_distributed_loading_by_transformers", False):
        return left_alone("a model that is sharded at load time" if strategy in _SUPPORTED else strategy,
                          "Transformers", config.on_error)  # fmt: skip
    return None


def check_arguments(trainer: Trainer, given: dict[str, Any]) -> None:
    """Raises UsageError for arguments of the Trainer, or of its `train`, that cannot work."""
    args: Any = trainer.args
    if given.get("trial") is not None or getattr(trainer, "hp_name", None) is not None:
        raise UsageError(
            "hyperparameter_search trains many models, and a job has one",
            hint="search with a plain Trainer, and give the chosen arguments to the elastic one",
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"this process has {args.n_gpu} GPUs, for torch's DataParallel",
            hint="start a process for each: dlrover-hooks run --nproc-per-node N train.py",
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size=True begins the training again with another batch size",
            hint="leave it out, and choose per_device_train_batch_size; global_batch_size= keeps the samples of a step",
        )
    if args.accelerator_config.split_batches:
        raise UsageError(
            "split_batches=True gives each process a part of the loader's batch; here a batch is one process's",
            hint="leave it out, give the batch size of one process, and global_batch_size= for all of them",
        )
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if args.world_size > 1 and counts and not args.average_tokens_across_devices:
        raise UsageError(
            "average_tokens_across_devices=False: the loss would depend on how samples are spread over the processes",
            hint="leave it at True: the loss is then the mean over the tokens of the step, at any world size",
        )


def check_loader(loader: Any) -> None:
    """Raises UsageError for a training loader without positions to resume at."""
    if is_leased(loader):
        raise UsageError(
            "train_dataset is a ShardDataset, which Trainer's loop cannot use: it counts the batches of an epoch "
            "before it starts, and cannot wait for what other workers give back",
            hint="give the dataset itself: every sample is trained once here, too",
        )
    if (reason := supports(loader)) is None:
        return
    made = type(loader.sampler).__name__ if isinstance(loader, DataLoader) else type(loader).__name__
    raise UsageError(
        f"the training loader ({made}) has no positions to resume at: {reason.splitlines()[0]}",
        hint="train_dataset= must be a map-style dataset, and train_sampling_strategy= 'random' or 'sequential'",
    )
