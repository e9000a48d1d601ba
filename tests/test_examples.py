"""The examples: modules that run by flags alone, as their READMEs say."""

import itertools
import math
import re
import shlex
import subprocess
import sys

import gymnasium
import pytest
import torch

import monobeast
from tests.parallel_envs import Crowd
from tests.programs import ROOT, SERIAL, both, load, read_logs, succeeds
from tests.test_agent import batches, make_actor, parse
from tests.test_learning import learns
from torchbeast import environment
from torchbeast.flags import load_agent, parse_args
from torchbeast.messages import BadInput
from torchbeast.policies import make_agent

EXAMPLES = ["minatar", "nethack", "rnd"]
if sys.version_info < (3, 11):
    EXAMPLES.remove("rnd")  # MiniGrid needs Python 3.11.
SHORT = ["--batch_size", 2, "--total_steps", 400, "--log_interval_steps", 80]
SHORT += ["--xpid", "x"]
SMALL = {
    "monobeast": [*SERIAL, "--envs_per_actor", 2],
    "polybeast": ["--num_servers", 1, "--envs_per_server", 2],
}


@pytest.fixture(params=EXAMPLES)
def example(request):
    return request.param


def documented(example):
    """The program and the flags of the first command in the example's README."""
    text = (ROOT / f"examples/{example}/README.md").read_text().replace("\\\n", " ")
    [program, flags] = re.search(r"^python -m (\w+) (.*)", text, re.M).groups()
    return program, shlex.split(flags)


def flags_for(example, module):
    """The documented flags; those of the documented program only for that program."""
    program, flags = documented(example)
    if module != program:
        flags = [x for name in ("--agent", "--env") for x in pair(flags, name)]
    return [*flags, *SMALL[module], *SHORT]


def pair(flags, name):
    return name, flags[flags.index(name) + 1]


def trains(savedir, *flags, module, steps=400):
    """Runs the program. Returns the rows of its log, which goes on to that step."""
    succeeds(*flags, "--savedir", savedir, module=module)
    rows = read_logs(savedir / "x")
    assert int(rows[-1]["step"]) == steps
    assert all(math.isfinite(float(row["total_loss"])) for row in rows)
    return rows


@both
def test_an_example_trains_in_either_program_by_flags_alone(example, module, savedir):
    trains(savedir, *flags_for(example, module), module=module)


def test_an_example_trains_with_a_recurrent_network(example, savedir):
    flags = flags_for(example, "monobeast")
    trains(savedir, *flags, "--use_lstm", module="monobeast")


@pytest.mark.parametrize("example", ["minatar", "rnd"])  # NetHack's games are long.
def test_a_trained_example_plays(example, savedir):
    flags = flags_for(example, "monobeast")
    trains(savedir, *flags, module="monobeast")
    result = succeeds(*flags, "--savedir", savedir, "--mode", "test",
                      "--num_test_episodes", 1, "--sample_actions")  # fmt: skip
    assert "episode 1: return" in result.stdout


def test_environments_are_made_where_there_is_no_torch(example):
    env = pair(documented(example)[1], "--env")[1]
    program = (
        "import sys; sys.modules['torch'] = None; "
        "from torchbeast import environment as e; "
        f"e.Environment(e.make({env!r}, 2)).initial(seed=0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_minatar_breakout_is_learned_with_the_documented_command(tmp_path):
    program, flags = documented("minatar")
    learns(program, flags, 5, tmp_path)


def test_the_time_limit_of_nethack_cuts_a_game_off_before_nle_ends_it():
    import examples.nethack.env  # noqa: F401

    env = gymnasium.make("torchbeast/NetHackScore-v0", disable_env_checker=True)
    limit = env
    while not isinstance(limit, gymnasium.wrappers.TimeLimit):
        limit = limit.env
    difference = env.unwrapped._max_episode_steps - limit._max_episode_steps
    limit._max_episode_steps = 5  # Wherever the limit is: nobody dies so soon.
    env.unwrapped._max_episode_steps = 5 + difference
    env.reset()
    search = list(env.unwrapped.actions).index(ord("s"))
    ends = [env.step(search)[2:4] for _ in range(5)]
    assert ends == 4 * [(False, False)] + [(False, True)]
    observation, _, terminated, *_ = env.step(search)
    assert terminated and not observation["blstats"].any()  # What the limit avoids.
    env.close()


# Random Network Distillation.


@pytest.mark.parametrize(("name", "same"), [("", False), ("SameMap-", True)])
def test_the_maps_of_episodes_are_the_same_where_the_name_says_so(name, same):
    env_id = f"examples.rnd.env:torchbeast/MiniGrid-{name}MultiRoom-N4-S5-v1"
    env = environment.Environment(environment.make(env_id, 2))
    first, second = (env.initial(seed)["observation"] for seed in (1, 2))
    assert (first[0] == first[1]).all() == same
    assert (first == second).all() == same
    assert (first.sum((1, 2, 3)) == 7 * 7 * 3).all()  # One of each kind a cell.


def test_the_characters_of_nethack_are_not_normalized():
    flags = parse_args(
        monobeast.program_parser("examples.nethack.agent"),
        ["--agent", "examples.nethack.agent", "--normalize_observations"],
    )
    monobeast.set_defaults(flags)
    space = gymnasium.spaces.Dict(
        glyphs=gymnasium.spaces.Box(0, 5976, (21, 79), "int16"),
        blstats=gymnasium.spaces.Box(-(2**31), 2**31 - 1, (27,), "int64"),
        message=gymnasium.spaces.Box(0, 255, (256,), "uint8"),
    )
    with pytest.raises(BadInput, match="^--normalize_observations: this agent's enc"):
        load_agent(flags.agent).Agent(flags, space, gymnasium.spaces.Discrete(5))


def test_the_agent_of_rnd_is_a_short_file():
    assert len((ROOT / "examples/rnd/agent.py").read_text().splitlines()) < 90


def test_rnd_logs_its_bonus_and_leaves_the_rewards_alone(savedir):
    flags = flags_for("rnd", "monobeast")
    rows = trains(savedir, *flags, "--bonus_weight", 1e6, module="monobeast")
    assert all(float(row["predictor_error"]) > 0 for row in rows)
    assert all(math.isfinite(float(row["bonus"])) for row in rows)
    returns = [float(row["episode_return"]) for row in rows if row["episode_return"]]
    assert all(-1 <= x <= 1 for x in returns)


def test_a_resumed_run_of_rnd_goes_on_with_its_predictor(savedir):
    flags = flags_for("rnd", "monobeast")
    trains(savedir, *flags, module="monobeast")
    first = load(savedir)["agent"]
    trains(savedir, *flags, module="monobeast")  # There is nothing left to do.
    second = load(savedir)["agent"]
    trains(savedir, *flags, "--total_steps", 800, module="monobeast", steps=800)
    third = load(savedir)["agent"]
    for name, x in first["novelty"].items():
        torch.testing.assert_close(second["novelty"][name], x, rtol=0, atol=0)
        same = torch.equal(third["novelty"][name], x)
        assert same == name.startswith("target."), name
    steps = [x["adam"]["state"][0]["step"].item() for x in (first, second, third)]
    assert steps == [10, 10, 20]
    counts = [x["novelty"]["errors.count"].item() for x in (first, second, third)]
    assert 0 < counts[0] == counts[1] < counts[2] <= 800  # Steps of actions.


def test_rnd_goes_on_where_all_of_a_batch_have_left():
    flags = parse(agent="examples.rnd.agent")
    env = environment.Environment([Crowd()])
    agent = load_agent(flags.agent).Agent(
        flags, env.observation_space, env.action_space
    )
    agent.start_learning(torch.device("cpu"))
    batch = next(batches(*make_actor(flags, env, agent=agent)))
    batch["done"].fill_(True)
    statistics = agent.learn(batch)
    assert statistics["predictor_error"] == statistics["bonus"] == 0
    assert all(p.isfinite().all() for p in agent.novelty.parameters())


def test_what_was_seen_often_gets_a_smaller_bonus_than_what_is_new():
    from examples.rnd.agent import Novelty

    torch.manual_seed(0)
    often, new = (torch.rand(50, 20) > 0.5).float(), (torch.rand(50, 20) > 0.5).float()
    novelty = Novelty(gymnasium.spaces.MultiBinary(20))
    optimizer = torch.optim.Adam(novelty.predictor.parameters(), 1e-3)
    for _ in range(200):
        errors, _ = novelty(often)
        optimizer.zero_grad()
        errors.mean().backward()
        optimizer.step()
    _, bonus = novelty(torch.cat([often, new]))
    assert bonus[50:].min() > bonus[:50].max()


def test_bonuses_are_by_the_mean_and_deviation_of_all_errors_so_far():
    from examples.rnd.agent import Novelty

    torch.manual_seed(0)
    novelty = Novelty(gymnasium.spaces.Box(-1, 1, (3,)))
    seen, errors = torch.zeros(0, 3), torch.zeros(0)
    for i, n in enumerate([80, 80, 1, 30]):  # Observations wander.
        x = torch.randn(n, 3) / 10 + i
        error, bonus = novelty(x)
        seen, errors = torch.cat([seen, x]), torch.cat([errors, error.detach()])
        expected = (error.detach() - errors.mean()) / errors.std(correction=0)
        torch.testing.assert_close(bonus.flatten(), expected)
        variance = seen.var(0, correction=0).double()
        torch.testing.assert_close(novelty.observations.variance, variance)


# One new file.

AUXILIARY_LOSS = """
from torch import nn

import polybeast


def parser():
    p = polybeast.parser()
    p.add_argument("--prediction_cost", type=float, default=0.1)
    return p


class Net(polybeast.Net):
    def __init__(self, *args):
        super().__init__(*args)
        self.prediction = nn.Linear(self.policy.in_features, 1)

    def heads(self, x):
        return {**super().heads(x), "prediction": self.prediction(x).squeeze(-1)}


class Agent(polybeast.Agent):
    def make_net(self, observation_space, action_space):
        encoder = self.make_encoder(observation_space)
        return Net(encoder, action_space, self.flags.use_lstm)

    def loss(self, batch, outputs):
        loss, statistics = super().loss(batch, outputs)
        error = (outputs["prediction"][:-1] - batch["reward"][1:]).square().sum()
        loss = loss + self.flags.prediction_cost * error
        return loss, {**statistics, "prediction_loss": error}
"""


@both
@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
def test_a_loss_with_its_flag_and_its_column_of_the_log_is_one_new_file(
    lstm, module, tmp_path, savedir, monkeypatch
):
    (tmp_path / "auxiliary_loss.py").write_text(AUXILIARY_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--agent", "auxiliary_loss", "--env", "CartPole-v1", *SMALL[module]]
    flags += [*SHORT, *lstm, "--prediction_cost", 0.5]
    rows = trains(savedir, *flags, module=module)
    assert all(float(row["prediction_loss"]) > 0 for row in rows)
    assert "prediction.weight" in load(savedir)["agent"]["model"]


def test_rnd_as_a_file_of_a_users_own_needs_no_other(tmp_path, savedir, monkeypatch):
    text = (ROOT / "examples/rnd/agent.py").read_text()
    (tmp_path / "my_rnd.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--agent", "my_rnd", "--env", "CartPole-v1", *SMALL["monobeast"], *SHORT]
    assert "bonus" in trains(savedir, *flags, module="monobeast")[0]


@pytest.mark.parametrize(("context", "num_actions"), [(3, 2), (20, 300)])
def test_attention_gives_what_it_gave_step_by_step(context, num_actions):
    """From the state a rollout begins with; nothing of other episodes is seen."""
    name = "examples.attention.agent"
    argv = ["--agent", name, "--num_actors", "0", "--unroll_length", "7"]
    flags = parse_args(
        monobeast.program_parser(name), [*argv, "--context", str(context)]
    )
    monobeast.set_defaults(flags)
    flags.precision = "float32"
    space = gymnasium.spaces.Discrete(num_actions)
    env = environment.Environment(
        [
            gymnasium.wrappers.TransformAction(
                gymnasium.make("CartPole-v1"), lambda action: action % 2, space
            )
            for _ in range(3)
        ]
    )
    agent = make_agent(flags, env)
    for parameter in agent.net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    actor, *buffers = make_actor(flags, env, agent=agent)
    padded = 0
    for batch in itertools.islice(batches(actor, *buffers), 30):
        with torch.no_grad():
            outputs, _ = agent.net(batch, batch["core_state"])
        acted = batch["mask"][1:]
        padded += (~acted).sum()
        torch.testing.assert_close(
            outputs["policy_logits"][:-1][acted], batch["policy_logits"][acted]
        )
    assert padded > 0


def test_attention_is_refused_rollouts_of_several_episodes():
    name = "examples.attention.agent"
    argv = ["--agent", name, "--num_actors", "0", "--no-one_episode_rollouts"]
    flags = parse_args(monobeast.program_parser(name), argv)
    monobeast.set_defaults(flags)
    with pytest.raises(BadInput, match="attend to other episodes"):
        make_agent(flags, environment.Environment(environment.make("CartPole-v1", 1)))
