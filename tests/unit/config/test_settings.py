"""Settings: keyword over environment over default, checked once."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks import config
from dlrover_hooks.config import validation
from dlrover_hooks.config.shared_keywords import SharedKeywords
from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Retention


@pytest.mark.parametrize(
    ("given", "means"),
    [(50, 50), ("50", 50), (" 7 ", 7), ("auto", "auto"), ("AUTO", "auto"), ("90s", "90s"), ("10m", "600s"),
     ("1.5h", "5400s"), ("250ms", "0.25s"), ("1d", "86400s"), (timedelta(minutes=2), "120s")],
)  # fmt: skip
def test_intervals_have_one_canonical_form(given: Any, means: int | str) -> None:
    assert config.interval(given, name="save_every") == means


@pytest.mark.parametrize("given", [0, -1, "0", True, "soon", "10 parsecs", "0s", timedelta(0), "", "5 5s"])
def test_other_intervals_are_refused_with_examples(given: Any) -> None:
    with pytest.raises(UsageError, match="save_every=") as refused:
        config.interval(given, name="save_every")
    assert '"90s"' in refused.value.hint


def test_a_keyword_wins_over_the_environment_and_none_is_not_given() -> None:
    env = {"DLROVER_HOOKS_KEEP": "5", "DLROVER_HOOKS_SAVE_EVERY": "2m", "DLROVER_HOOKS_SAVE_TO": ""}
    found = config.load(env, keep=3, save_every=None)
    assert (found.keep, found.save_every, found.save_to, found.persist_every) == (3, "120s", None, "600s")


def test_the_environment_is_typed() -> None:
    env = {"DLROVER_HOOKS_STORAGE_OPTIONS": '{"anon": true}', "DLROVER_HOOKS_DISABLE": "1",
           "DLROVER_HOOKS_GLOBAL_BATCH_SIZE": "64"}  # fmt: skip
    found = config.load(env)
    assert (found.storage_options, found.disable, found.global_batch_size) == ({"anon": True}, True, 64)


@pytest.mark.parametrize(
    ("name", "text"), [("KEEP", "many"), ("STORAGE_OPTIONS", "{"), ("DISABLE", "perhaps"), ("GLOBAL_BATCH_SIZE", "1.5")]
)
def test_an_unreadable_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"DLROVER_HOOKS_{name}=") as refused:
        config.load({f"DLROVER_HOOKS_{name}": text})
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("DISABLE", "yes", "set DLROVER_HOOKS_DISABLE to 1 or 0"),
        ("STORAGE_OPTIONS", "abc", '{"anon": true}'),
        ("STORAGE_OPTIONS", "[1]", '{"anon": true}'),
        ("GLOBAL_BATCH_SIZE", "0", "over all ranks"),
        ("SAVE_EVERY", "soon", '"90s"'),
        ("KEEP", "0", "from 1"),
        ("SNAPSHOT", "later", '"lazy"'),
        ("RESUME", "maybe", '"auto"'),
        ("ON_ERROR", "ignore", '"warn"'),
        ("REPLICAS", "2", "one replica"),
        ("REPLICA_MB_PER_S", "-1", "no limit"),
    ],
)
def test_a_variable_is_named_as_it_was_set(name: str, text: str, hint: str) -> None:
    """Not by the keyword, which the user of the variable has never seen; and with what to do."""
    with pytest.raises(UsageError, match=f"^DLROVER_HOOKS_{name}=") as refused:
        config.load({f"DLROVER_HOOKS_{name}": text})
    assert hint in refused.value.hint


def test_no_variable_of_ours_is_taken_for_a_misspelt_one(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the sources or the manual call by name."""
    package = Path(config.__file__).parent.parent
    texts = [path.read_text() for path in (*package.rglob("*.py"), package.parent / "docs" / "operate.md")]
    names = {
        f"DLROVER_HOOKS_{name}"
        for text in texts
        for name in re.findall(r'(?:DLROVER_HOOKS_|PREFIX \+ ")([A-Z_]+\b)', text)
    }
    assert {"DLROVER_HOOKS_RUNTIME_DIR", "DLROVER_HOOKS_JOB"} < names
    config.load(dict.fromkeys(names, ""))
    assert caplog.messages == []


def test_a_misspelt_variable_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    env = {"DLROVER_HOOKS_SAVE_EVRY": "5", "DLROVER_HOOKS_RUN_WORKERS": "2", "DLROVER_HOOKS_NODE": "n", "HOME": "/"}
    for _ in range(2):
        config.load(env)
    assert caplog.messages == [
        "DLROVER_HOOKS_SAVE_EVRY is set, but means nothing here: did you mean DLROVER_HOOKS_SAVE_EVERY?"
    ]


@pytest.mark.parametrize(
    "wrong", [{"keep": 0}, {"on_error": "ignore"}, {"global_batch_size": 0}, {"resume": "maybe"}, {"save_every": 0}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        config.load({}, **wrong)


@pytest.mark.parametrize(
    ("save_to", "reason"),
    [("", "names no folder"), ("memory://x", "one process"), ("file::memory://x", "one process"),
     ("simplecache::memory://x", "one process")],
)  # fmt: skip
def test_a_save_to_that_no_later_start_could_read_is_refused(save_to: str, reason: str) -> None:
    """Before anything is written or trained."""
    with pytest.raises(UsageError, match=f"save_to='{save_to}' .*{reason}") as refused:
        config.load({}, save_to=save_to)
    assert "leave save_to out" in refused.value.hint
    assert config.load({}, save_to="./memory").save_to == "./memory"


def test_paths_are_text(tmp_path: Path) -> None:
    """A path object goes wherever its text does."""
    found = config.load({}, save_to=tmp_path / "saved", resume=tmp_path)
    assert (found.save_to, found.resume) == (str(tmp_path / "saved"), str(tmp_path))
    assert config.load({}, resume=Path("never")).resume.endswith("/never")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [({"save_to": 3}, "folder"), ({"storage_options": "x"}, "dict"), ({"keep": "two"}, "every_steps"),
     ({"job": 7.5}, "name"), ({"master": b"x"}, "http"), ({"global_batch_size": 1.5}, "samples")],
)  # fmt: skip
def test_a_wrong_type_is_a_usage_error(wrong: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}=") as refused:
        config.load({}, **wrong)
    assert hint in refused.value.hint


def test_every_keyword_has_a_hint() -> None:
    names = {field.name for field in msgspec.structs.fields(config.Config)}
    assert names - set(validation.WANTED) == {"save_every", "persist_every", "keep", "named"}


@pytest.mark.parametrize(
    ("name", "hint"), [("save_evry", "did you mean 'save_every'?"), ("x", "known are disable, fresh"), ("named", "")]
)
def test_a_keyword_that_is_none_is_refused(name: str, hint: str) -> None:
    """A misspelt one would silently keep its default."""
    with pytest.raises(UsageError, match=f"no keyword '{name}'") as refused:
        config.load({}, **{name: None})
    assert hint in refused.value.hint


def test_a_launched_worker_cannot_be_of_another_job() -> None:
    """The launcher's keeper and seat are for its own job: another name would wait for nothing."""
    launched = {"DLROVER_HOOKS_JOB": "a", "DLROVER_HOOKS_INCARNATION": "i"}
    with pytest.raises(UsageError, match="'b'") as refused:
        config.load(launched, job="b")
    assert "--job b" in refused.value.hint
    assert config.load(launched, job="a").job == "a"
    config.use_seat(launched)
    assert config.load(launched, job="b").job == "b"


def test_a_url_may_be_resumed() -> None:
    assert config.load({}, resume="file:///old").resume == "file:///old"


def test_the_job_is_not_named_by_a_ci_server() -> None:
    """Jenkins sets JOB_NAME: its second build would find the job of the first one trained to its end."""
    assert not config.load({"TORCHELASTIC_RUN_ID": "none", "JOB_NAME": "nightly"}).named


@pytest.mark.parametrize("given", ["host:8780", "http://host:8780", "https://host:8780"])
def test_a_masters_address_may_leave_out_http(given: str) -> None:
    """As the launcher's --rdzv-endpoint."""
    url = given if "://" in given else f"http://{given}"
    assert config.load({"DLROVER_HOOKS_MASTER": given}).master == url
    assert config.load({}, master=given).master == url


@pytest.mark.parametrize(
    ("env", "job"),
    [({"SLURM_JOB_ID": "17", "JOB_NAME": "x"}, "17"), ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "17"}, "17"),
     ({"DLROVER_HOOKS_JOB": "a", "TORCHELASTIC_RUN_ID": "b"}, "a")],
)  # fmt: skip
def test_the_job_is_named_by_its_launcher(env: dict[str, str], job: str) -> None:
    found = config.load(env)
    assert (found.job, found.named) == (job, True)


def test_a_made_up_job_is_new_each_time() -> None:
    """No later start can find it, so nothing waits for one."""
    one, other = config.load({}), config.load({})
    assert one.job != other.job
    assert not one.named


def test_the_framework_knows_its_rank_better_than_the_environment() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "DLROVER_HOOKS_NODE": "n",
        "DLROVER_HOOKS_INCARNATION": "i",
    }
    assert config.place(env) == config.Place(rank=3, world_size=4, local_rank=1, node="n", incarnation="i")
    assert config.place(env, rank=0, world_size=1).rank == 0
    assert config.place({}).node


def test_a_seat_serves_one_session() -> None:
    env = {"DLROVER_HOOKS_INCARNATION": "i"}
    config.use_seat(env)
    config.use_seat(env)
    assert env == {}


RULES = Retention(2, 1000, "3600s")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (3, 3), ("3", 3), ("last=3", 3), ({"last": 3}, 3), (Retention(3), 3),
        ("last=2,every_steps=1000,every=1h", RULES), (" every = 60m , every_steps=1000", RULES),
        ({"every_steps": 1000, "every": "1h"}, RULES), (Retention(2, 1000, "1h"), RULES), (RULES, RULES),
        ({"every_steps": 1000, "every": timedelta(hours=1)}, RULES), ("every_steps=5", Retention(2, 5)),
    ],
)  # fmt: skip
def test_what_is_kept_is_said_in_many_ways(given: Any, found: Any) -> None:
    """In code, in YAML and in the environment; durations become seconds."""
    assert config.load({}, keep=given).keep == found
    if isinstance(given, str):
        assert config.load({"DLROVER_HOOKS_KEEP": given}).keep == found


@pytest.mark.parametrize(
    "wrong", ["last", "newest=2", "last=x", "every=soon", "every=5", "every=auto", "every_steps=0", "last=0", 2.5, True,
              "last=1,", {"last": True}, -1, [2]],
)  # fmt: skip
def test_what_is_to_be_kept_must_be_said(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"^keep=") as refused:
        config.load({}, keep=wrong)
    assert refused.value.hint


@pytest.mark.parametrize(
    "keep",
    [0, -3, "0", "-3", "last=0", {"last": 0}, Retention(last=0), "last=2,last=5", "every_steps=0", "every=0s",
     "every=nan s", "every=...s", "last=", "last=2,", "²", 2.5, True, None],
)  # fmt: skip
def test_rules_that_keep_nothing_or_say_it_twice_are_refused(keep: Any) -> None:
    """0 meant 1, and of two rules of one name the last one won."""
    with pytest.raises(UsageError, match="does not say what to keep") as refused:
        config.retention(keep)
    assert "keep=2" in refused.value.hint


def test_signals_that_say_that_this_worker_is_to_go() -> None:
    """Names, in any case; none of them is a choice, an unknown one is not; and there must be time to save."""
    assert config.load({}).signals == ["SIGTERM", "SIGUSR1"]
    assert config.load({"DLROVER_HOOKS_PREEMPT_SIGNALS": "sigusr2, SIGTERM"}).signals == ["SIGUSR2", "SIGTERM"]
    assert config.load({"DLROVER_HOOKS_PREEMPT_SIGNALS": "none"}).signals == []
    assert [config.load({"DLROVER_HOOKS_GRACE": text}).grace_s for text in ("50", "50s", "1m")] == [50, 50, 60]
    assert [config.load({}, grace=given).grace for given in (25, 2.5, timedelta(minutes=1))] == ["25s", "2.5s", "60s"]
    with pytest.raises(UsageError, match=r"SIGGONE.*names no signals"):
        config.load({"DLROVER_HOOKS_PREEMPT_SIGNALS": "SIGGONE"})
    with pytest.raises(UsageError, match="names no signals"):
        config.load({}, preempt_signals="SIGKILL")
    with pytest.raises(UsageError, match="no time to save"):
        config.load({}, grace=0)


def test_the_time_without_a_step_that_is_reported() -> None:
    assert config.load({}).step_timeout_s is None, "learned"
    assert config.load({"DLROVER_HOOKS_STEP_TIMEOUT": "none"}).step_timeout_s == math.inf
    assert [config.load({"DLROVER_HOOKS_STEP_TIMEOUT": text}).step_timeout_s for text in ("90", "2m")] == [90, 120]
    assert config.load({}, step_timeout=timedelta(minutes=10)).step_timeout == "600s"
    with pytest.raises(UsageError, match="step_timeout"):
        config.load({}, step_timeout="soon")
    with pytest.raises(UsageError, match="no time for a step"):
        config.load({}, step_timeout=0)


def test_the_shared_keywords_are_those_of_config() -> None:
    """What editors offer for an adapter is what `load` accepts."""
    settings = {field.name for field in msgspec.structs.fields(config.Config)} - {"named", "save_to"}
    assert set(SharedKeywords.__annotations__) == settings


def test_several_masters() -> None:
    """Each address is completed; a list without one is refused."""
    assert config.load({"DLROVER_HOOKS_MASTER": "a:1, http://b:2,"}).master == "http://a:1,http://b:2"
    with pytest.raises(UsageError, match="names no master"):
        config.load({"DLROVER_HOOKS_MASTER": ","})
