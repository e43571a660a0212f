"""A `Trainer` that was broken off behind any step ends as the one that nobody disturbed, bit for bit. One process."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from dlrover_hooks.cli import main
from tests import ranks
from tests.e2e.master_process import LiveMaster
from tests.integrations.transformers_cases import (
    SAMPLES,
    TOKENS,
    Crash,
    StopsEpochs,
    Watched,
    WatchedSeq2Seq,
    adapted,
    end,
    made,
    model,
    sft,
    translator,
)
from tests.integrations.transformers_ranks import CRASH

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.filterwarnings("ignore")]

WARM = ("torch._dynamo", "tests.integrations.transformers_cases", "trl.trainer.sft_trainer", "peft")
BEST = {
    "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.3,
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "patience": 1,
}  # fmt: skip
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "accumulation, short last window": lambda: {"gradient_accumulation_steps": 3},
    "early stopping and the best model": lambda: dict(BEST),
    "epochs that are left": lambda: {"callbacks": [StopsEpochs(4)], "eval_strategy": "epoch"},
    "max_steps": lambda: {"max_steps": 13, "train_sampling_strategy": "sequential", "logging_steps": 3},
    "Seq2SeqTrainer": lambda: {
        "cls": WatchedSeq2Seq,
        "trainer": {"model": translator},
        "predict_with_generate": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "generation_max_length": 4,
    },
    "SFTTrainer": sft,
    "LoRA": lambda: {"trainer": {"model": adapted}, "gradient_accumulation_steps": 2, "num_train_epochs": 1},
    "a mean for each micro-batch": lambda: {"gradient_accumulation_steps": 2, "cls": MeanLoss, "num_train_epochs": 1.5},
}


class MeanLoss(Watched):
    """Of a model that knows nothing of other micro-batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


CRASHES: dict[str, Sequence[int]] = {"every": range(1, 60), "some": (2, 5, 60)}
"""The steps in which lives end; the last life comes to the end of the run."""


def lives(
    folder: Path, job: str, options: Callable[[], dict[str, Any]], crashes: Sequence[int]
) -> tuple[list[Any], Watched]:
    """Broken off in these steps, one after the other: what the model that is left was trained on, and the last one."""
    seen: list[Any] = []
    for before, crash in zip((0, *crashes), crashes, strict=False):
        trainer = made(folder, job, crash, **options())
        done = False
        with contextlib.suppress(Crash):
            trainer.train()
            done = True
        elastic: Any = trainer.elastic  # pyright: ignore[reportAttributeAccessIssue]
        begun = elastic.restored.generation.step if elastic.restored is not None else 0
        assert begun == before
        seen = [one for one in seen if one[1] < begun] + trainer.seen
        if done:
            return seen, trainer
    raise AssertionError("it never ends")


def scalars(trainer: Watched) -> list[tuple[Any, ...]]:
    """World size, attempt and skipped saves, as they stand in the log beside each loss."""
    names = [f"dlrover/{name}" for name in ("world_size", "attempt", "skipped_saves")]
    return [tuple(map(row.get, names)) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.deep
@pytest.mark.parametrize(("case", "which"), [
    ("early stopping and the best model", "every"),
    ("a mean for each micro-batch", "some"),
    ("Seq2SeqTrainer", "some"),
    *((case, "every") for case in CASES if case != "early stopping and the best model"),
])  # fmt: skip
def test_broken_off_in_any_step_it_is_the_undisturbed_run(case: str, which: str, tmp_path: Path, job: str) -> None:
    """Accumulation and epochs that are left: also in the adapter contract. LoRA and SFTTrainer: also by two processes,
    below.
    """
    folder, crashes = tmp_path / "out", CRASHES[which]
    calm = made(folder, f"{job}-calm", **CASES[case]())
    calm.train()
    expected = end(calm)
    if case == "early stopping and the best model":
        assert expected["best"][1] < expected["step"] < calm.state.max_steps
    shutil.rmtree(folder)
    seen, last = lives(folder, job, CASES[case], crashes)
    assert seen == calm.seen
    found = end(last)
    attempts = [1 + sum(crash < row["step"] for crash in crashes) for row in found["log"] if "loss" in row]
    assert scalars(last) == [(1, attempt, 0) for attempt in attempts], "an attempt for each life"
    torch.testing.assert_close(found.pop("weights"), expected.pop("weights"), rtol=0, atol=0)
    torch.testing.assert_close(found.pop("moments"), expected.pop("moments"), rtol=0, atol=0)
    assert found == expected


def test_each_sample_is_trained_once_in_an_epoch(tmp_path: Path, job: str) -> None:
    trainer = made(tmp_path, job, gradient_accumulation_steps=3, per_device_train_batch_size=3)
    trainer.train()
    visits = Counter((epoch, one) for epoch, _, ids in trainer.seen for one in ids)
    assert visits == Counter((epoch, one) for epoch in range(2) for one in range(SAMPLES))
    assert trainer.state.global_step == 2 * 3
    assert trainer.args.gradient_accumulation_steps == 3


@pytest.mark.deep
def test_a_mean_over_labels_is_the_same_at_any_world_size(tmp_path: Path, job: str, live_master: LiveMaster) -> None:
    """Four micro-batches for three processes: two of them repeat one, whose labels, tokens and loss do not count.

    Transformers computes this loss in float32, whatever the model's weights are.
    """
    script = str(ranks.ROOT / "tests/integrations/transformers_world.py")
    command = [sys.executable, script]
    (single,) = ranks.run([*command, f"{job}-1", str(tmp_path / "one")], 1, timeout_s=100, warm=WARM)
    found = ranks.run([*command, f"{job}-3", str(tmp_path / "three")], 3, live_master, timeout_s=100, warm=WARM)
    assert [one["tokens"] for one in found] == [single["tokens"]] * 3 == [2 * SAMPLES * TOKENS] * 3
    for one in found:
        torch.testing.assert_close(one["losses"], single["losses"], rtol=1e-5, atol=0)
        assert max(abs(a - b) for a, b in zip(one["weights"], single["weights"], strict=True)) < 1e-7


@pytest.mark.deep
def test_stock_peft_reads_an_exported_lora(tmp_path: Path, job: str) -> None:
    """A checkpoint holds the frozen base, too."""
    from peft import PeftModel

    saved, model_folder, adapter = (str(tmp_path / name) for name in ("saved", "model", "adapter"))
    trainer = made(tmp_path / "out", job, trainer={"model": adapted}, num_train_epochs=1, shared={"save_to": saved})
    trainer.train()
    done = CliRunner().invoke(main.main, ["ckpt", "export", "--to", "hf", saved, model_folder])
    assert done.exit_code == 0, done.output
    tensors = load_file(f"{model_folder}/model.safetensors")
    expected = cast(Any, trainer.model).eval()
    assert tensors.keys() >= {name for name, _ in expected.named_parameters()}
    read = adapted().eval()
    assert read.load_state_dict(tensors, strict=False).unexpected_keys == []
    read.save_pretrained(adapter)
    again = PeftModel.from_pretrained(model(), adapter).eval()
    row = torch.arange(TOKENS).unsqueeze(0)
    for one in (read, again):
        torch.testing.assert_close(one(row).logits, expected(row).logits, rtol=0, atol=0)
    assert not torch.equal(expected(row).logits, adapted().eval()(row).logits)


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["SFTTrainer with LoRA", "SFTTrainer", "Seq2SeqTrainer"])
def test_two_processes_broken_off_and_resumed(case: str, tmp_path: Path, job: str, live_master: LiveMaster) -> None:
    """DDP over gloo. A step has three micro-batches for two ranks: one of them repeats one, which counts nowhere."""
    script = str(ranks.ROOT / "tests/integrations/transformers_ranks.py")
    found = ranks.run([sys.executable, script, job, str(tmp_path), case], 2, live_master, timeout_s=500, warm=WARM)
    lived = [[one for one in found if one["rank"] == rank] for rank in range(2)]
    seen: list[list[Any]] = []
    for calm, first, second in lived:
        assert (first["restored"], second["restored"]) == (0, CRASH)
        assert second["end"] == calm["end"]
        kept = [row for row in first["seen"] if row[1] < CRASH] + second["seen"]
        assert kept == calm["seen"]
        seen += kept
    visits = Counter((epoch, one) for epoch, _, ids in seen for one in ids)
    assert visits == Counter((epoch, one) for epoch in range(2) for one in range(SAMPLES))
    ends = [calm["end"] for calm, *_ in lived]
    assert ends[0]["weights"] == ends[1]["weights"]
    if case.startswith("SFTTrainer"):
        tokens = 2 * sum(TOKENS - index % 3 for index in range(SAMPLES))
        assert [max(row.get("num_tokens", 0) for row in end["log"]) for end in ends] == [tokens] * 2
