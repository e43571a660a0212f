"""A Lightning run that kills itself once: `script.py LIVES`, under the launcher; FOLDER is where it writes."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO
from tests.integrations.test_lightning_io import Net, Numbers


class Logged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("trained", loss)
        return loss


class Kill(Callback):
    """In the first life, when the saves of the step are written."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 12 and not self.mark.exists():
            self.mark.touch()
            trainer.strategy.checkpoint_io.teardown()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    best = ModelCheckpoint(monitor="loss", mode="max", save_top_k=2, save_last=True)
    steps = ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1, save_weights_only=True)
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", devices=1, logger=CSVLogger(folder / "logs", flush_logs_every_n_steps=1),
        callbacks=[*callbacks, best, steps], enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, **options,
    )  # fmt: skip
    trainer.fit(Logged(), DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=4))
    return trainer


def main() -> None:
    folder = Path(os.environ["FOLDER"])
    elastic = ElasticCallback(save_every=7)
    restored: list[int] = []

    class Note(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            restored.append(elastic.restored.generation.step if elastic.restored is not None else 0)

    fit(folder, elastic, Note(), Kill(folder.with_name("killed")), plugins=[FlashCheckpointIO()])
    with open(sys.argv[1], "a") as lives:
        lives.write(json.dumps({"restored": restored[0]}) + "\n")


if __name__ == "__main__":
    main()
