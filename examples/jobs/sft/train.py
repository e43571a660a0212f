"""Supervised fine-tuning as a job of two roles: `dataset` serves tokens, and the workers of `trainer` train.

    python examples/jobs/sft/train.py --model models:GRU --workers 2

template.py builds the job from these arguments. Exit code 1 if the job failed.
"""

import argparse
import sys

from template import sft

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--model", default="models:GPT", help="module:class, see models.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-to", help="URL for durable checkpoints")
    given = parser.parse_args()
    job = sft(model=given.model, workers=given.workers, epochs=given.epochs, save_to=given.save_to)
    sys.exit(job.build().submit(backend=given.backend))
