"""The Lightning example. Its `training_step` records the samples that it trains on, as evidence for the demo."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "lightning"))
import train


class Numbered(train.StandardLibrary):
    """Returns each window together with its number."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), index


class Recorded(train.CharacterGPT):
    """Writes one unbuffered line per training step to the file: a `kill -9` loses no record of a trained step."""

    def on_train_start(self) -> None:
        name = f"{os.environ['DLROVER_HOOKS_ROUND']}-{self.global_rank}.jsonl"
        path = Path(os.environ["DEMO_RECORDS"]) / name
        self.record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        callbacks = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # Lightning sets it elsewhere
        elastic = next(callback for callback in callbacks if isinstance(callback, train.ElasticCallback))
        restored = elastic.restored.source.value if elastic.restored is not None else None
        self.write(pid=os.getpid(), master=os.environ["DLROVER_HOOKS_MASTER"], restored_from=restored)

    def write(self, **line: Any) -> None:
        os.write(self.record, json.dumps(line | {"at": time.time()}).encode() + b"\n")

    def loss(self, batch: Any) -> Tensor:
        windows, _ = batch
        return super().loss(windows)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.write(step=self.global_step + 1, epoch=self.current_epoch, ids=batch[1].tolist(), loss=loss.item())
        return loss


train.StandardLibrary, train.CharacterGPT = Numbered, Recorded
train.main()
