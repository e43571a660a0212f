"""A small GPT that learns to write Python by reading Python's own standard library, in an Accelerate loop."""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CONTEXT, WIDTH, VOCABULARY = 64, 64, 128


class StandardLibrary(Dataset):
    """Windows of `CONTEXT` characters of the library's source; `part` is a slice of the files in order of name."""

    def __init__(self, part: slice, windows: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[part])[: windows * CONTEXT + 1]
        self.windows = torch.tensor(list(text)).clamp(max=VOCABULARY - 1).unfold(0, CONTEXT + 1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows[index][:-1], self.windows[index][1:]


class CharacterGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(text) + self.place, mask=self.mask, is_causal=True)
        losses = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten(), reduction="none")
        return losses.view(following.shape).mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=2000, help="training windows of 64 characters")
    given = parser.parse_args()
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    model = CharacterGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train = DataLoader(StandardLibrary(slice(0, 60), given.windows), 32, shuffle=True)
    val = DataLoader(StandardLibrary(slice(60, None), given.windows // 10), 32)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    for epoch in range(given.epochs):
        model.train()
        for text, following in train:
            accelerator.backward(model(text, following).mean())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(text, following)) for text, following in val]
        accelerator.print(f"epoch {epoch}: validation loss {torch.cat([*map(torch.as_tensor, losses)]).mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
