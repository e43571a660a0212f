"""Two small language models of bytes, and their loss."""

import torch
from torch import Tensor, nn

WIDTH, VOCABULARY, LENGTH = 64, 256, 128


def answer_loss(logits: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
    """The mean over the samples of the mean over the tokens of the answer.

    tokens: [batch, length], padded with zeros. asked: [batch], the number of tokens of each instruction.
    """
    each = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    places = torch.arange(1, tokens.shape[1])
    answers = (places >= asked[:, None]) & (tokens[:, 1:] > 0)
    return ((each * answers).sum(1) / answers.sum(1)).mean()


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.block(self.embed(tokens) + self.place[: tokens.shape[1]], src_mask=mask, is_causal=True)
        return answer_loss(self.head(hidden), tokens, asked)


class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        return answer_loss(self.head(self.layer(self.embed(tokens))[0]), tokens, asked)
