"""Settings: keyword arguments over environment variables over defaults; the only reader of the environment.

Importing it has no side effects and contacts no service. Entry point: `from dlrover_hooks import config`.
"""

from __future__ import annotations

from dlrover_hooks.config.duration import Duration as Duration
from dlrover_hooks.config.duration import interval as interval
from dlrover_hooks.config.duration import retention as retention
from dlrover_hooks.config.settings import (
    LAST_WORDS as LAST_WORDS,
)
from dlrover_hooks.config.settings import (
    PREFIX as PREFIX,
)
from dlrover_hooks.config.settings import (
    Config as Config,
)
from dlrover_hooks.config.settings import (
    Place as Place,
)
from dlrover_hooks.config.settings import (
    Tls as Tls,
)
from dlrover_hooks.config.settings import (
    change_environment as change_environment,
)
from dlrover_hooks.config.settings import (
    changed_environment as changed_environment,
)
from dlrover_hooks.config.settings import (
    drill as drill,
)
from dlrover_hooks.config.settings import (
    environment as environment,
)
from dlrover_hooks.config.settings import (
    environment_of as environment_of,
)
from dlrover_hooks.config.settings import (
    global_batch_size as global_batch_size,
)
from dlrover_hooks.config.settings import (
    global_seed as global_seed,
)
from dlrover_hooks.config.settings import (
    gpu as gpu,
)
from dlrover_hooks.config.settings import (
    last_words_to as last_words_to,
)
from dlrover_hooks.config.settings import (
    load as load,
)
from dlrover_hooks.config.settings import (
    of_lost_peer as of_lost_peer,
)
from dlrover_hooks.config.settings import (
    omp_threads as omp_threads,
)
from dlrover_hooks.config.settings import (
    place as place,
)
from dlrover_hooks.config.settings import (
    preload_file as preload_file,
)
from dlrover_hooks.config.settings import (
    replace_environment as replace_environment,
)
from dlrover_hooks.config.settings import (
    runtime_dir as runtime_dir,
)
from dlrover_hooks.config.settings import (
    seats_itself as seats_itself,
)
from dlrover_hooks.config.settings import (
    slurm_environment as slurm_environment,
)
from dlrover_hooks.config.settings import (
    stay_in_runtime_dir as stay_in_runtime_dir,
)
from dlrover_hooks.config.settings import (
    step_for_last_words as step_for_last_words,
)
from dlrover_hooks.config.settings import (
    tell_launcher as tell_launcher,
)
from dlrover_hooks.config.settings import (
    tell_workers as tell_workers,
)
from dlrover_hooks.config.settings import (
    tls as tls,
)
from dlrover_hooks.config.settings import (
    use_seat as use_seat,
)
from dlrover_hooks.config.settings import (
    visible_gpus as visible_gpus,
)
from dlrover_hooks.config.settings import (
    worker_environment as worker_environment,
)
from dlrover_hooks.config.spelling import keywords as keywords
