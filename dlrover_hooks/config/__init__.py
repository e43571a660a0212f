"""Settings: keyword arguments over environment variables over defaults; the only reader of the environment.

Importing it has no side effects and contacts no service. Entry point: `from dlrover_hooks import config`.
"""

from __future__ import annotations

from dlrover_hooks.config.duration import Duration as Duration, interval as interval, retention as retention
from dlrover_hooks.config.settings import (
    LAST_WORDS as LAST_WORDS,
    PREFIX as PREFIX,
    STACK_SIGNAL as STACK_SIGNAL,
    Config as Config,
    Place as Place,
    TaskPlace as TaskPlace,
    Tls as Tls,
    change_environment as change_environment,
    changed_environment as changed_environment,
    drill as drill,
    environment as environment,
    environment_of as environment_of,
    global_batch_size as global_batch_size,
    global_seed as global_seed,
    last_words_to as last_words_to,
    load as load,
    of_lost_peer as of_lost_peer,
    omp_threads as omp_threads,
    place as place,
    plugins as plugins,
    preload_file as preload_file,
    ray_address as ray_address,
    replace_environment as replace_environment,
    runtime_dir as runtime_dir,
    seats_itself as seats_itself,
    slurm_environment as slurm_environment,
    stay_in_runtime_dir as stay_in_runtime_dir,
    step_for_last_words as step_for_last_words,
    task as task,
    tell_launcher as tell_launcher,
    tell_workers as tell_workers,
    tls as tls,
    use_seat as use_seat,
    visible_gpus as visible_gpus,
    worker_environment as worker_environment,
)
from dlrover_hooks.config.spelling import keywords as keywords
