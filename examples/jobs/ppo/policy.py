"""The policy, and the loss of PPO."""

import zlib
from typing import Any

import torch
from environment import CONTEXT, KINDS
from torch import Tensor, nn


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(128, 16), nn.Linear(CONTEXT * 16, 64)
        self.head = nn.Linear(64, len(KINDS) + 2)

    def forward(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """For texts [batch, CONTEXT]: logarithms of the kinds' probabilities [batch, kinds], and expected rewards."""
        out = self.head(self.hidden(self.embed(texts).flatten(1)).tanh())
        return out[:, :-1].log_softmax(-1), out[:, -1]


def encoded(rows: list[Any]) -> Tensor:
    """The character codes of (position, text) rows, limited to 127: [batch, CONTEXT]."""
    return torch.tensor([[min(127, ord(character)) for character in text] for _, text in rows])


def ppo_loss(policy: nn.Module, texts: Tensor, kinds: Tensor, before: Tensor, rewards: Tensor) -> Tensor:
    """The clipped loss of Schulman et al. 2017, with value and entropy terms.

    before: [batch], the log probabilities with which the kinds were drawn.
    """
    logs, expected = policy(texts)
    ratio = (logs.gather(1, kinds[:, None])[:, 0] - before).exp()
    advantage = rewards - expected.detach()
    clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = -(logs.exp() * logs).sum(-1).mean()
    return nn.functional.mse_loss(expected, rewards) / 2 - clipped - 0.01 * entropy


def checksum(policy: nn.Module) -> str:
    weights = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    return f"{zlib.crc32(weights.numpy().tobytes()):08x}"
