"""--agent: what a program asks of an agent, and what it says if that is not there."""

import argparse
import os
import runpy
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import monobeast
import polybeast
import ppo
import warpbeast
from tests.programs import (
    ROOT,
    SERIAL,
    args,
    both,
    load,
    main,
    read_logs,
    refusal,
    succeeds,
)
from torchbeast import environment, rollouts
from torchbeast.flags import AGENTS
from torchbeast.log_writer import COLUMNS
from torchbeast.messages import BadInput
from torchbeast.program import name_of

LOG = ("--log_interval_steps", 40)


def flags_of(module, savedir, *others, **kwargs):
    serial = SERIAL if module == "monobeast" else ()
    return args(module, savedir, *serial, *LOG, *others, **kwargs)


@pytest.mark.parametrize("agent", AGENTS)
def test_presets_have_flags_that_are_there(agent):
    parsers = [x.program_parser(agent) for x in (monobeast, polybeast, warpbeast)]
    known = {name for p in parsers for name in vars(p.parse_args([]))}
    for preset in parsers[0].presets.values():
        assert preset.keys() <= known


@pytest.fixture
def my_agent(monkeypatch):
    """my_agent(Agent): makes it the Agent of a module of that name."""

    def my_agent(agent):
        module = types.SimpleNamespace(parser=polybeast.parser, Agent=agent)
        monkeypatch.setitem(sys.modules, "my_agent", module)

    return my_agent


@both
def test_an_agent_of_a_users_own_runs_in_either_program(savedir, module):
    """What its act() returned arrives in its learn(), and what learn() returns in the
    log, under names that no other file knows."""
    flags = ("--agent", "tests.batch_norm_agent", "--num_epochs", 1)
    result = succeeds(*flags_of(module, savedir, *flags, steps=200), module=module)
    rows = read_logs(savedir / "x")
    assert [int(row["step"]) for row in rows] == [40, 80, 120, 160, 200]
    assert [float(row["sum_difference"]) for row in rows] == 5 * [0]
    assert "sum_difference" not in COLUMNS
    assert load(savedir)["agent"]["model"]["encoder.encoder.1.num_batches_tracked"] == 5
    assert "--agent tests.batch_norm_agent" in result.stderr.splitlines()[-1]
    test = ("--mode", "test", "--num_test_episodes", 1)
    assert main(*flags_of(module, savedir, *flags, *test), module=module)[0] == 0


@pytest.mark.parametrize(
    ("program", "flags"), [("monobeast", ["--num_actors", 0]), ("polybeast", [])]
)
def test_a_copy_of_a_program_is_a_program_of_its_own(
    savedir, program, flags, tmp_path, monkeypatch
):
    name = f"my_{program}"
    text = (ROOT / f"{program}.py").read_text()
    text = text.replace('"pg_loss": losses.pg', '"my_loss": losses.pg')
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    result = main(*flags_of(program, savedir, *flags, steps=80), module=name)
    assert result.returncode == 0, result.stderr
    assert f"to resume: python -m {name} --env" in result.stderr
    row = read_logs(savedir / "x")[-1]
    assert ("my_loss" in row) == (program == "polybeast")
    test = [*flags_of(program, savedir), "--mode", "test", "--num_test_episodes", 1]
    assert main(*test, module=name).returncode == 0
    assert refusal("--lr", 1, module=name).startswith(f"{name}: error: ")


@pytest.mark.parametrize("agent", ["ppo", "pqn", "r2d2", "sac", "td3"])
def test_an_agent_that_is_run_as_a_program_says_what_it_is(agent):
    with pytest.raises(SystemExit, match=f"python -m monobeast --agent {agent}"):
        runpy.run_module(agent, run_name="__main__")


@pytest.mark.parametrize("agent", ["polybeast", "ppo", "pqn", "r2d2"])
def test_a_flag_that_a_checkpoint_has_may_be_given_either_way(agent):
    words = ["--no-use_lstm", "--no-one_episode_rollouts"]
    flags = monobeast.program_parser(agent).parse_args(words)
    assert not flags.use_lstm and not flags.one_episode_rollouts


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (None, "fork"),
        ("fork", "fork"),
        ("mine.fork", "mine.fork"),
        ("builtins", "fork"),  # Under cProfile, pdb or trace.
        ("__main__", "fork"),
    ],
)
def test_a_program_has_the_name_of_its_file_however_it_is_started(spec, name):
    spec = None if spec is None else types.SimpleNamespace(name=spec)
    assert name_of(spec, "/somewhere/fork.py") == name


@both
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_agent", "--agent no_such_agent: No module named"),
        ("", "--agent : "),
        ("vtrace", "--agent vtrace: expected a module with parser"),
        ("polybeast_env", "--agent polybeast_env: expected a module with Agent"),
    ],
)
def test_what_is_no_agent_is_one_line(savedir, module, name, words):
    assert words in refusal(*flags_of(module, savedir, "--agent", name), module=module)
    assert not savedir.exists()


def test_an_agent_may_have_flags_of_its_own(savedir, my_agent, monkeypatch):
    def parser():
        p = polybeast.parser()
        p.add_argument("--batch_of_my_own", type=int, default=3)
        return p

    seen = []

    class Agent(polybeast.Agent):
        def start_learning(self, device):
            super().start_learning(device)
            seen.append(self.flags.batch_of_my_own)

    my_agent(Agent)
    monkeypatch.setattr(sys.modules["my_agent"], "parser", parser)
    for flags, expected in ((), 3), (("--batch_of_my_own", 4), 4):
        flags = ("--agent", "my_agent", *flags)
        assert main(*flags_of("monobeast", savedir, *flags, steps=40))[0] == 0
        assert seen.pop() == expected
    assert "--batch_of_my_own" in main("--agent", "my_agent", "--help").stdout
    assert "--batch_of_my_own" not in main("--help").stdout


def test_an_agent_whose_checkpoint_would_lack_its_weights_does_not_begin(
    savedir, my_agent
):
    class Agent(polybeast.Agent):
        def state_dict(self):
            return {"mine": 1}

    my_agent(Agent)
    line = refusal(*flags_of("monobeast", savedir, "--agent", "my_agent"))
    assert "state_dict() lacks 'model': it has to extend super()" in line


def test_an_agent_that_does_not_count_its_updates_is_told_so(savedir, my_agent):
    class Agent(polybeast.Agent):
        def count(self, batch):
            pass

    my_agent(Agent)
    with pytest.raises(TypeError, match=r"did not call self.count\(batch\)"):
        main(*flags_of("monobeast", savedir, "--agent", "my_agent"))


def test_a_network_without_an_encoder_gets_observations_as_they_are(savedir, my_agent):
    class Net(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.inner, self.initial_state = net, net.initial_state

        def forward(self, step, core_state):
            return self.inner(step, core_state)

    class Agent(polybeast.Agent):
        def make_net(self, *spaces):
            return Net(super().make_net(*spaces))

    my_agent(Agent)
    flags = flags_of("monobeast", savedir, "--agent", "my_agent", steps=40)
    result = main(*flags)
    assert result.returncode == 0 and "--no-normalize_observations" in result.stderr
    line = refusal(*flags, "--xpid", "other", "--normalize_observations")
    assert "the network of --agent my_agent has no `encoder`" in line


# What act() returns.


def returning(**changes):
    """An agent whose act() returns other outputs, or no action (action=None)."""

    class Agent(polybeast.Agent):
        def act(self, step, core_state, greedy=False):
            outputs, core_state = super().act(step, core_state, greedy)
            outputs.update({k: f(step) for k, f in changes.items() if f is not None})
            for name in [k for k, f in changes.items() if f is None]:
                del outputs[name]
            return outputs, core_state

    return Agent


WRONG_OUTPUTS = [
    (returning(reward=lambda step: step["reward"]), "'reward', which a rollout has of"),
    (returning(core_state=lambda step: step["reward"]), "'core_state', which a rollou"),
    (returning(action=None), r"\['policy_logits'\], expected 'action' in it"),
    (
        returning(value=lambda step: step["reward"][0]),
        r"value as torch.float32 \[2\], expected a tensor \[1, 2, ...\]",
    ),
    (
        returning(value=lambda step: torch.zeros(3, 2)),
        r"value as torch.float32 \[3, 2\], expected a tensor \[1, 2, ...\]",
    ),
    (
        returning(value=lambda step: {"a": torch.zeros(1)}),
        r"value/a as torch.float32 \[1\], ex",
    ),
    (returning(value=lambda step: 0 / step["reward"]), "value is not finite"),
    (returning(value=lambda step: 7), "value as int, expected a tensor"),
    (
        returning(value=lambda step: torch.zeros(1, 2, requires_grad=True)),
        r"value as torch.float32 \[1, 2\] with a gradient",
    ),
    (
        returning(action=lambda step: step["reward"]),
        r"action as torch.float32 \[1, 2\], expected action as torch.int64 \[1, 2\]",
    ),
]


@pytest.mark.parametrize(("agent", "message"), WRONG_OUTPUTS)
def test_what_no_rollout_can_hold_is_an_error_that_names_it(agent, message):
    flags = polybeast.program_parser().parse_args([])
    env = environment.Environment(environment.make("CartPole-v1", 2))
    agent = agent(flags, env.observation_space, env.action_space)
    with pytest.raises(ValueError, match=message):
        rollouts.specs(agent, env.initial(0), agent.flags)


def test_a_core_state_of_another_shape_is_an_error_that_names_both():
    class Agent(polybeast.Agent):
        def act(self, step, core_state, greedy=False):
            outputs, core_state = super().act(step, core_state, greedy)
            return outputs, tuple(x[..., :3] for x in core_state)

    flags = polybeast.program_parser().parse_args(["--use_lstm"])
    env = environment.Environment(environment.make("CartPole-v1", 2))
    agent = Agent(flags, env.observation_space, env.action_space)
    with pytest.raises(ValueError, match=r"core_state.*3\].*expected .*256\]"):
        rollouts.specs(agent, env.initial(0), agent.flags)


def remembering(initial, after):
    """An agent whose network has another core_state: initial(batch_size), and after
    each step what after(that) returns."""

    class Net(polybeast.Net):
        def initial_state(self, batch_size):
            return initial(batch_size)

        def forward(self, step, core_state=()):
            return super().forward(step)[0], after(core_state)

    class Agent(polybeast.Agent):
        def make_net(self, observation_space, action_space):
            return Net(self.make_encoder(observation_space), action_space)

    return Agent


def same(state):
    return state


WRONG_STATES = [
    # Without the first dimension.
    (lambda B: torch.zeros(B, 3), same, r"initial_state\(\) .* torch.float32 \[2, 3\]"),
    (lambda B: (torch.zeros(1, B), 7), same, "core_state/1 as int, expected a tensor"),
    (lambda B: (None,), same, "core_state/0 as NoneType, expected a tensor"),
    (
        lambda B: {"n": torch.zeros(())},
        same,
        r"core_state/n as torch.float32 \[\], exp",
    ),
    # Of another type after a step.
    (
        lambda B: torch.zeros(1, B, dtype=torch.int64),
        lambda n: n + 0.5,
        "act.* core_state as torch.float32 .*, expected core_state as torch.int64",
    ),
    (
        lambda B: torch.zeros(1, B),
        lambda x: x > 0,
        "act.* core_state as torch.bool .*, expected core_state as torch.float32",
    ),
    (
        lambda B: torch.zeros(1, B, requires_grad=True),
        same,
        "initial_state.* with a gradient, expected",
    ),
]


def specs_of(agent):
    words = ["--no-normalize_rewards", "--no-separate_value"]
    flags = polybeast.program_parser().parse_args(words)
    env = environment.Environment(environment.make("CartPole-v1", 2))
    agent = agent(flags, env.observation_space, env.action_space)
    return rollouts.specs(agent, env.initial(0), agent.flags)


@pytest.mark.parametrize(("initial", "after", "message"), WRONG_STATES)
def test_a_core_state_that_no_rollout_can_hold_is_an_error_that_names_it(
    initial, after, message
):
    with pytest.raises(BadInput, match=message):
        specs_of(remembering(initial, after))


def test_a_core_state_with_a_gradient_is_an_error():
    class Agent(remembering(lambda B: torch.zeros(1, B), lambda x: x)):
        def act(self, step, core_state, greedy=False):
            outputs, _ = super().act(step, core_state, greedy)
            weight = self.net.policy.bias[0]
            return outputs, core_state + weight

    with pytest.raises(BadInput, match=r"act\(\) .* with a gradient, expected"):
        specs_of(Agent)


def test_a_core_state_may_have_its_entries_in_any_order():
    def initial(B):
        return {"h": torch.zeros(1, B, 3), "n": torch.zeros(1, B, dtype=torch.int64)}

    specs = specs_of(remembering(initial, lambda x: {"n": x["n"] + 1, "h": x["h"]}))
    assert specs["core_state"]["h"].shape == (1, 3)


@both
def test_what_act_returns_is_looked_at_before_anything_is_started(
    module, savedir, my_agent
):
    my_agent(returning(action=None))
    line = refusal(*flags_of(module, savedir, "--agent", "my_agent"), module=module)
    assert "act() returned ['policy_logits'], expected 'action' in it" in line
    assert not savedir.exists()


# What loss() returns.


@pytest.mark.parametrize("base", [polybeast, ppo])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda total, x: total, "loss.. returned Tensor, NoneType, expected .loss"),
        (lambda total, x: None, "loss.. returned NoneType, NoneType, expected .loss"),
        (
            lambda total, x: (total + torch.zeros(4), x),
            r"a loss torch.float32 \[4\] with",
        ),
        (lambda total, x: (total.detach(), x), r"a loss torch.float32 \[\], exp"),
    ],
)
def test_a_loss_that_cannot_be_learned_from_is_an_error_that_says_so(
    base, changed, message, savedir, my_agent, monkeypatch
):
    class Agent(base.Agent):
        def loss(self, batch, outputs):
            return changed(*super().loss(batch, outputs))

    my_agent(Agent)
    monkeypatch.setattr(sys.modules["my_agent"], "parser", base.parser)
    sizes = ("--unroll_length", 4, "--batch_size", 4)
    with pytest.raises(TypeError, match=message):
        main(*flags_of("monobeast", savedir, "--agent", "my_agent", *sizes))


# What learn() returns.


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        ({"frames": 1.0}, "learn() returned the statistic 'frames', expected"),
        ({"two words": 1.0}, "learn() returned the statistic 'two words', expected"),
        ({"my_loss": float("nan")}, "my_loss is nan at step 40 (update 1)"),
        ({"my_loss": torch.tensor(torch.inf)}, "my_loss is inf at step 40 (update 1)"),
    ],
)
def test_a_statistic_that_cannot_be_logged_ends_the_run_in_a_line_that_names_it(
    statistics, words, savedir, my_agent
):
    class Agent(polybeast.Agent):
        def learn(self, batch):
            return {**super().learn(batch), **statistics}

    my_agent(Agent)
    result = main(*flags_of("monobeast", savedir, "--agent", "my_agent"))
    assert result.returncode == 1
    assert [words in line for line in result.stderr.splitlines()].count(True) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        (torch.zeros(2), r"'mine' as a tensor of shape \[2\], expected one number"),
        ("1", "'mine' as str, expected one number"),
        (None, "'mine' as NoneType, expected one number"),
    ],
)
def test_a_statistic_that_is_not_one_number_is_refused_by_name(
    statistic, message, savedir, my_agent
):
    class Agent(polybeast.Agent):
        def learn(self, batch):
            return {**super().learn(batch), "mine": statistic}

    my_agent(Agent)
    with pytest.raises(TypeError, match=message):
        main(*flags_of("monobeast", savedir, "--agent", "my_agent"))


@pytest.mark.parametrize(("num", "width"), [(300, 1), (900, 90)])
def test_a_log_of_very_many_columns_is_kept_when_the_run_resumes(
    num, width, savedir, my_agent
):
    names = [f"statistic_{i:0{width}}" for i in range(num)]

    class Agent(polybeast.Agent):
        def learn(self, batch):
            many = dict.fromkeys(names, self.updates / 3)
            return {**super().learn(batch), **many}

    my_agent(Agent)
    for steps in (80, 160):
        flags = flags_of("monobeast", savedir, "--agent", "my_agent", steps=steps)
        assert main(*flags).returncode == 0
    rows = read_logs(savedir / "x")
    assert [int(row["step"]) for row in rows] == [40, 80, 120, 160]
    last = [float(row[names[-1]]) for row in rows]
    assert last == pytest.approx([0, 1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (np.float64(0.5), "float64"),
        (torch.Generator(), "Generator"),
        (lambda x: x, "function"),
        ((i for i in range(3)), "generator"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    entry, kind, savedir, my_agent
):
    class Agent(polybeast.Agent):
        def state_dict(self):
            return {**super().state_dict(), "mine": {"a": 1, "b": entry}}

    my_agent(Agent)
    line = refusal(*flags_of("monobeast", savedir, "--agent", "my_agent"))
    assert "the agent's state_dict() holds what no checkpoint can, expected" in line
    assert line.endswith(f": mine/b is a {kind}")


@both
def test_an_agent_that_exits_ends_the_run_as_it_says(savedir, module, my_agent):
    class Agent(polybeast.Agent):
        def learn(self, batch):
            sys.exit(7)

    my_agent(Agent)
    flags = flags_of(module, savedir, "--agent", "my_agent")
    assert main(*flags, module=module).returncode == 7


def colliding():
    p = polybeast.parser()
    p.add_argument("--seed")
    return p


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        (lambda: None, "parser() returned NoneType, expected argparse.ArgumentParser"),
        (argparse.ArgumentParser, "expected argparse.ArgumentParser(add_help=False)"),
        (colliding, "--agent my_agent: parser(): argument --seed: conflicting option"),
    ],
)
def test_a_parser_that_does_not_fit_is_one_line(parser, words, my_agent, monkeypatch):
    my_agent(polybeast.Agent)
    monkeypatch.setattr(sys.modules["my_agent"], "parser", parser)
    assert words in refusal("--agent", "my_agent")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import no_such_package", ModuleNotFoundError),
        ("int('64,64')", ValueError),
        ("(lambda channels, side: [])(3)", TypeError),
        ("raise ImportError('install einops')", ImportError),
    ],
)
def test_what_an_agents_module_raises_is_a_traceback_of_its_own(
    line, error, tmp_path, monkeypatch
):
    (tmp_path / "agent_of_mine.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "agent_of_mine", raising=False)
    with pytest.raises(error) as e:
        main("--agent", "agent_of_mine")
    assert tmp_path / "agent_of_mine.py" in [entry.path for entry in e.traceback]


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so_by_the_processes_that_it_starts(tmp_path):
    script = tmp_path / "script.py"
    flags = ["--savedir", str(tmp_path / "logs"), "--env", "CartPole-v1"]
    flags += ["--num_actors", "1", "--max_actor_restarts", "0"]
    script.write_text(f"import monobeast\nmonobeast.main({flags})\n")
    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "the script needs `if __name__ == '__main__':`" in result.stderr
    assert len(list((tmp_path / "logs").glob("torchbeast-*"))) == 1


def test_a_statistic_that_comes_later_is_empty_in_the_rows_before(savedir, my_agent):
    class Agent(polybeast.Agent):
        def learn(self, batch):
            statistics = super().learn(batch)
            late = {"late": torch.ones(()), "number": 3} if self.updates > 2 else {}
            return {**statistics, **late}

    my_agent(Agent)
    succeeds(*flags_of("monobeast", savedir, "--agent", "my_agent", steps=160))
    rows = read_logs(savedir / "x")
    assert [row["late"] for row in rows] == ["", "", "1.0", "1.0"]
    assert [row["number"] for row in rows] == ["", "", "3.0", "3.0"]
