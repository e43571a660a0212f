"""The contract's trial under `ElasticAccelerator`."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard

from dlrover_hooks import protocol as p
from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from dlrover_hooks.pytorch.even_batches import leader
from tests.contracts.trial import Crash, Given, Report, Setup, joint_loss, keywords


def train(given: Given, crash: int | None) -> Report:
    """See `Trial`. With W processes Accelerate steps the scheduler W times in a step, so it is made W times as slow."""
    made, report = Setup(given), Report()
    accelerator = ElasticAccelerator(
        Accelerator(cpu=True, gradient_accumulation_steps=given.accumulate, step_scheduler_with_optimizer=False),
        **keywords(given),
    )
    model, optimizer, schedule, evaluation, *feeds = accelerator.prepare(
        made.net, made.optimizer, made.schedule, made.evaluation, *made.loaders
    )
    report.active = accelerator.loop is not None
    report.restored = accelerator.restored.generation.step if accelerator.restored else None
    report.untouched = (made.own is None or feeds[-1] is made.own) and type(evaluation) is DataLoaderShard
    step, elastic = report.restored or 0, [feed for feed in feeds if feed is not made.own]
    try:
        for epoch in accelerator.epochs(given.epochs):
            for batches in zip(*feeds, strict=False):
                if step == crash:
                    raise Crash
                (x, ids), *others = batches
                if accelerator.loop is None or leader(elastic).weight:
                    report.note(epoch, step, "train", ids)
                if made.own is not None:
                    report.own += others.pop().tolist()
                if others and (accelerator.loop is None or leader(elastic).weight):
                    report.note(epoch, step, "second", others[0][1])
                with accelerator.accumulate(model):
                    loss = joint_loss(given, model, [(x, ids), *others])
                    accelerator.backward(loss)
                    optimizer.step()
                    if accelerator.sync_gradients:
                        schedule.step()
                    optimizer.zero_grad()
                step += accelerator.sync_gradients
                if given.leave and step == (epoch + 1) * given.leave:
                    break
            seen = [accelerator.gather_for_metrics(ids) for _, ids in evaluation]
            report.evaluated.append([one for ids in seen for one in ids.tolist()])
        accelerator.end_training()
    except Crash:
        report.crashed = True
        accelerator.close(p.Departure.FAILED)
    report.step = step
    report.end(made.net, made.optimizer, made.schedule)
    return report
