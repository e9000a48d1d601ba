"""What benchmarks count."""

from types import SimpleNamespace

import pytest

from benchmarks import limit, soak
from torchbeast.messages import log, setup_logging


@pytest.mark.parametrize("agent", [["--agent", "ppo"], ["--agent=ppo"]])
def test_the_limit_is_of_the_agent_that_is_named(agent):
    flags = limit.parse("monobeast", ["--env", "CartPole-v1", *agent])
    assert flags.agent == "ppo" and flags.num_minibatches > 0


def test_the_limit_counts_steps_of_agents():
    args = ["--env", "warp/TagGridWorld", "--envs_per_actor", "3"]
    step, num_steps = limit.stage(limit.parse("monobeast", args), "environment")
    assert len(step()["reward"]) == num_steps == 15


def test_a_session_of_the_soak_is_not_taken_for_the_one_before(tmp_path, monkeypatch):
    counts = "1 delivered, 1 learned from (1 begun, 0 lost with their streams, 0 u"
    line, handlers = f"rollouts: {counts}nfinished at the end)", log.handlers[:]
    run = soak.Soak(tmp_path, [], None)
    run.rank_log.parent.mkdir()
    monkeypatch.setattr(soak, "step", lambda directory: 0)
    monkeypatch.setattr(
        soak, "Program", lambda *args, **kwargs: SimpleNamespace(
            output=line, end=lambda: 0, wait_for=lambda text: ""
        )
    )  # fmt: skip
    for says in (True, False):
        run.start_learner()
        setup_logging(run.rank_log, rank=1)
        if says:
            log.info("stopped by SIGTERM; %s", line)
            run.end_learner("stopped by SIGTERM")
    assert run.sessions[0]["rollouts"]["delivered"] == 2
    with pytest.raises(AssertionError, match="not stopped by SIGTERM"):
        run.end_learner("stopped by SIGTERM")
    log.handlers[:] = handlers
