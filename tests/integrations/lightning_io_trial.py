"""One of two DDP processes that save behind the step: `python -m ... FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from dlrover_hooks.integrations.lightning.async_checkpoint_io import FlashCheckpointIO
from tests.integrations.test_lightning_io import Net, Numbers


def main() -> None:
    folder = sys.argv[1]
    data = DataLoader(Numbers(), batch_size=2)
    files = ModelCheckpoint(folder, save_last=True)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[files],
                      plugins=[FlashCheckpointIO()], **options)  # fmt: skip
    trainer.fit(Net(), data)
    trainer.validate(Net(), data, ckpt_path="best")
    sys.stdout.write(json.dumps({"files": sorted(os.listdir(folder))}) + "\n")


if __name__ == "__main__":
    main()
