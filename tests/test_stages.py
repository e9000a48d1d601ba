"""What a run says at its end of where its time went, and what helps."""

import argparse
import itertools
import re
import time
import types

import numpy as np
import pytest
from gymnasium import spaces

from tests.programs import Program, args, mono_first, read_logs, succeeds
from torchbeast import stages
from torchbeast.encoders import make_encoder

SMALL = make_encoder(spaces.Box(-1, 1, (4,), np.float32))
ATARI = make_encoder(spaces.Box(0, 255, (84, 84, 4), np.uint8))
LATE = "tests.faulty_envs:Late-v0"
LARGE = make_encoder(spaces.Dict(eye=spaces.Box(0, 255, (120, 160, 3), np.uint8)))


def hint(program, net, longest, update=9.0, busy=0.6, more=(), **flags):
    """The last line of the report of a run where this stage took longest. more: other
    stages' seconds."""
    names = [*stages.STAGES["streams"]]
    if program == "monobeast":
        names.remove("inference_queue")
    seconds = dict.fromkeys(names, 1.0)
    seconds |= {longest: 9.0, "learner_wait": 1.0, "update": update, **dict(more)}
    own = dict(envs_per_server=8)
    if program == "monobeast":
        own = dict(envs_per_actor=16, num_actors=2)
    run = types.SimpleNamespace(
        flags=argparse.Namespace(**own | flags),
        stage_seconds=lambda: seconds,
        busy_cores=lambda: busy,
    )
    *where, line = stages.report(run, net)
    assert [x.split()[4] for x in where] == [
        "streams" if program == "polybeast" else "actors",
        "learner",
    ]
    return line.partition("bottleneck: ")[2]


@pytest.mark.parametrize(
    ("program", "longest"),
    [
        *itertools.product(["polybeast", "monobeast"], ["inference", "cores"]),
        ("polybeast", "rollout_queue"),
    ],
)
def test_a_small_network_is_to_be_called_for_more_environments_at_a_time(
    program, longest
):
    flag = {"polybeast": "envs_per_server", "monobeast": "envs_per_actor"}[program]
    now = {"polybeast": 8, "monobeast": 16}[program]
    stage = "inference" if longest == "cores" else longest
    busy = 1000.0 if longest == "cores" else 0.6
    line = hint(program, SMALL, stage, busy=busy)
    assert f"--{flag} {4 * now}, {now} now" in line
    assert "GPU" not in line and "smaller network" not in line
    line = hint(program, ATARI, stage, busy=busy)
    assert "GPU" in line and flag not in line and "--resize" not in line


def test_what_computes_all_the_time_and_has_hardly_a_core_is_told_of_others():
    line = "other programs have the cores"
    for longest in ("inference", "rollout_queue"):
        assert hint("monobeast", SMALL, longest, busy=0.2) == line
        gpu = hint("monobeast", SMALL, longest, busy=0.2, learner_device="cuda:0")
        assert gpu != line
    assert hint("monobeast", SMALL, "environment_wait", busy=0.2) != line
    apart = hint("monobeast", SMALL, "rollout_queue", busy=0.2, more={"reduction": 9.0})
    assert apart != line  # Other learners are waited for.


def test_where_all_rows_wait_for_an_update_one_that_is_slow_is_not_called_learning():
    more, waits = {"environment_wait": 5.0}, {"async": False}
    line = hint("monobeast", SMALL, "rollout_queue", 0.1, 0.2, more, **waits)
    assert line.startswith("environments: ")


def test_a_network_of_many_parameters_is_not_small():
    wide = make_encoder(spaces.Box(-1, 1, (4,), np.float32), hidden_sizes=[1024, 1024])
    line = hint("monobeast", wide, "rollout_queue")
    assert line == "learning: a GPU (--learner_device cuda), or a smaller network"


def test_what_learns_from_a_small_network_too_often_is_told_of_fewer_updates():
    assert "--batch_size" in hint("monobeast", SMALL, "rollout_queue")
    for program in ("monobeast", "polybeast"):
        line = hint(program, SMALL, "rollout_queue", replay_ratio=8.0)
        assert line == "learning: fewer gradient steps (--replay_ratio)"
        line = hint(program, ATARI, "rollout_queue", replay_ratio=8.0)
        assert line.startswith("learning: fewer gradient steps (--replay_ratio); a GPU")


@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
@pytest.mark.parametrize("longest", ["environment_wait", "inference", "rollout_queue"])
def test_large_images_are_named_whatever_they_slow_down(program, longest):
    line = hint(program, LARGE, longest)
    assert "--resize 84, as observation/eye is 120 x 160" in line


def test_the_longest_stage_is_named():
    assert hint("polybeast", ATARI, "environment_wait").startswith("environments: ")
    line = hint("polybeast", ATARI, "inference_queue")  # It is for inference.
    assert line.startswith("inference: ")
    assert hint("polybeast", ATARI, "rollout_queue").startswith("learning: ")
    # If the learner waits, it is not what streams wait for.
    line = hint("polybeast", ATARI, "rollout_queue", update=0.1)
    assert not line.startswith("learning: ")
    assert hint("monobeast", ATARI, "environment_wait").startswith("environments: ")
    # If the learner never waits, it is what all wait for.
    line = hint("monobeast", ATARI, "environment_wait", update=19.0)
    assert line.startswith("learning: ")
    # Where acting waits for updates, either may take longer.
    waiting = {"async": False}
    line = hint("monobeast", ATARI, "rollout_queue", update=1.0, **waiting)
    assert line.startswith("learning: ")
    line = hint("monobeast", ATARI, "environment_wait", update=19.0, **waiting)
    assert line.startswith("environments: ")
    # All in one thread: that one core of many is busy says nothing.
    serial = dict(program="monobeast", net=ATARI, busy=1000.0, num_actors=0)
    assert hint(longest="inference", update=8.0, **serial).startswith("inference: ")
    assert hint(longest="inference", update=10.0, **serial).startswith("learning: ")


@pytest.mark.parametrize("flags", [("--num_actors", 1), ("--num_actors", 0)])
def test_monobeast_says_where_its_time_went(flags, savedir):
    words = args("monobeast", savedir, *flags, "--log_interval_steps", 200, steps=2000)
    result = succeeds(*words)
    names = "environment_wait", "inference", "rollout_queue"
    for row in read_logs(savedir / "x"):
        shares = [float(row[name]) for name in names]
        assert min(shares[:2]) > 0 and sum(shares) == pytest.approx(1, abs=0.01)
        assert not row["inference_queue"]
    assert "where the time of actors went: environment_wait " in result.stderr
    assert "cores were busy; bottleneck: " in result.stderr


@mono_first
def test_a_wait_that_a_signal_ends_counts(savedir, module):
    words = args(module, savedir, "--log_interval_steps", 40, env=LATE)
    with Program(*words, module=module) as program:
        program.wait_for("step 40 of")
        time.sleep(4)  # The next batch would come after 8 s.
        program.stop()
    assert "bottleneck: environments: " in program.output, program.output
    share = re.search(r"went: learner_wait (\d+) %, update", program.output)
    assert int(share[1]) > 10, program.output
