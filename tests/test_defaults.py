"""What agents do without flags, by the kind of environment."""

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn

import monobeast
import polybeast
import ppo
from tests.programs import main, succeeds
from tests.test_agent import batches, make_actor, parse
from torchbeast import environment, ranks
from torchbeast.encoders import NumbersEncoder
from torchbeast.flags import load_agent, parse_args
from torchbeast.nests import map_structure

IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
SMALL_IMAGE = spaces.Box(0, 255, (10, 10, 4), np.uint8)
NUMBERS = spaces.Box(-np.inf, np.inf, (3,))
CHOICES, BOX = spaces.Discrete(2), spaces.Box(-1, 1, (2,))
ATARI, OTHER = "PongNoFrameskip-v4", "CartPole-v1"


def flags_of(env, observation_space, action_space, *args):
    flags = parse("--env", env, *args)
    polybeast.Agent(flags, observation_space, action_space)
    return flags


def ppo_flags_of(env, observation_space, *args, action_space=CHOICES):
    args = ["--env", env, "--num_actors", "0", *args]
    flags = parse_args(monobeast.program_parser("ppo"), args)
    monobeast.set_defaults(flags)
    ppo.Agent(flags, observation_space, action_space)
    return flags


def r2d2_of(observation_space, *args):
    args = ["--env", OTHER, "--num_actors", "0", *args]
    flags = parse_args(monobeast.program_parser("r2d2"), args)
    monobeast.set_defaults(flags)
    return load_agent("r2d2").Agent(flags, observation_space, CHOICES), flags


def test_a_parser_reads_the_command_line_itself(monkeypatch):
    monkeypatch.setattr("sys.argv", ["monobeast", "--seed", "7"])
    assert monobeast.program_parser().parse_args().seed == 7


def test_ataris_are_as_docs_learning_has_them():
    flags = flags_of(ATARI, IMAGE, CHOICES)
    assert flags.chosen == {
        "normalize_observations": False, "normalize_rewards": False,
        "reward_clipping": "abs_one", "vtrace_lambda": 1.0, "entropy_cost": 0.01,
        "num_epochs": 1, "learning_rate": 1e-3, "baseline_cost": 0.5,
        "separate_value": False, "numbers_net": "mlp", "net": "shallow",
    }  # fmt: skip
    assert flags.ratio_clipping == 0.2  # Without it Breakout's return falls at times.


def test_those_of_numbers_are_as_docs_agents_has_them():
    expected = {
        "normalize_observations": True, "normalize_rewards": True,
        "reward_clipping": "none", "vtrace_lambda": 0.95, "entropy_cost": 3e-4,
        "num_epochs": 4, "learning_rate": 1e-3, "baseline_cost": 0.5,
        "separate_value": True, "numbers_net": "tanh",
    }  # fmt: skip
    assert flags_of(OTHER, NUMBERS, CHOICES).chosen == expected
    expected |= {
        "entropy_cost": 1e-3, "baseline_cost": 0.1,
        "separate_value": False, "numbers_net": "mlp",
    }  # fmt: skip
    assert flags_of(OTHER, NUMBERS, CHOICES, "--use_lstm").chosen == expected


@pytest.mark.parametrize("program", [monobeast, polybeast])
@pytest.mark.parametrize(
    ("args", "space", "num_ranks", "batch_size"),
    [
        ("--use_lstm", NUMBERS, 1, 16),
        ("--use_lstm", NUMBERS, 3, 18),  # As many for each learner.
        ("--use_lstm --batch_size 6", NUMBERS, 1, 6),
        ("--use_lstm --preset a2c", NUMBERS, 1, 16),
        ("--use_lstm", IMAGE, 1, 4),
        ("", NUMBERS, 1, 4),
    ],
)
def test_impalas_batches_of_numbers_are_larger_with_an_lstm(
    program, args, space, num_ranks, batch_size, monkeypatch
):
    monkeypatch.setattr(ranks.current, "num", num_ranks)
    words = [*args.split(), "--learner_device", "cpu"]
    flags = parse_args(program.program_parser(), words)
    flags.command = ["x", *words]
    program.set_defaults(flags, 1, space)
    polybeast.Agent(flags, space, CHOICES)
    assert flags.batch_size == batch_size
    was_chosen = "batch_size" in vars(flags).get("chosen", {})
    assert was_chosen == (args == "--use_lstm" and space is NUMBERS)


@pytest.mark.parametrize("space", [IMAGE, NUMBERS])
def test_rewards_are_clipped_on_atari_alone(space):
    flags = flags_of(OTHER, space, CHOICES)
    assert flags.reward_clipping == "none" and flags.normalize_rewards


@pytest.mark.parametrize(
    ("agent", "layers", "factor"),
    [
        ("polybeast", {nn.Tanh}, 1),
        ("ppo", {nn.Tanh}, 1),
        ("pqn", {nn.LayerNorm, nn.ReLU}, 1),
        ("r2d2", {nn.ReLU}, 10),
    ],
)
def test_numbers_go_through_the_layers_of_the_agent(agent, layers, factor):
    flags = monobeast.program_parser(agent).parse_args(["--env", OTHER])
    monobeast.set_defaults(flags)
    net = load_agent(agent).Agent(flags, NUMBERS, CHOICES).net
    modules = list(net.encoder.modules())
    assert {*map(type, modules)} & {nn.Tanh, nn.LayerNorm, nn.ReLU} == layers
    assert {x.factor for x in modules if isinstance(x, NumbersEncoder)} == {factor}


@pytest.mark.parametrize("args", [[], ["--no-use_lstm"], ["--preset", "dqn"]])
@pytest.mark.parametrize("env", [ATARI, OTHER])
def test_r2d2_clips_rewards_on_atari_alone_unless_it_rescales_values(env, args):
    def clipping(*words):
        parser = monobeast.program_parser("r2d2")
        flags = parse_args(parser, ["--env", env, "--num_actors", "0", *words])
        load_agent("r2d2").Agent(flags, IMAGE, CHOICES)
        return flags.reward_clipping

    clips = env == ATARI or "dqn" in args
    assert clipping(*args) == ("abs_one" if clips else "none")
    assert clipping("--preset", "r2d2") == "none"
    assert clipping("--value_rescaling") == "none"
    assert clipping("--value_rescaling", "--reward_clipping", "abs_one") == "abs_one"


@pytest.mark.parametrize("agent", ["polybeast", "ppo", "pqn", "sac", "td3"])
@pytest.mark.parametrize(
    ("space", "normalized"),
    [
        (NUMBERS, True),
        (IMAGE, False),
        (spaces.Dict(camera=IMAGE, joints=spaces.Tuple([NUMBERS])), True),
        (spaces.Dict(camera=IMAGE, text=spaces.Box(0, 255, (9,), np.uint8)), False),
        (spaces.Dict(camera=IMAGE, gear=CHOICES), False),
    ],
)
def test_agents_but_r2d2_normalize_observations_with_numbers(agent, space, normalized):
    """Beside an image, too: IMPALA learned nothing of 1,000 to 1,003, and SAC's critics
    nothing from pixels' coordinates."""
    flags = monobeast.program_parser(agent).parse_args(["--env", OTHER])
    monobeast.set_defaults(flags)
    actions = BOX if agent in ("sac", "td3") else CHOICES
    load_agent(agent).Agent(flags, space, actions)
    assert flags.normalize_observations == normalized


def test_ppos_of_atari_are_cleanrls():
    chosen = dict(ppo.DEFAULTS, normalize_observations=False)
    assert ppo_flags_of(ATARI, IMAGE).chosen == chosen


def test_ppo_normalizes_rewards_but_ataris():
    numbers, image = ppo_flags_of(OTHER, NUMBERS), ppo_flags_of(OTHER, IMAGE)
    for flags in (numbers, image):
        assert flags.reward_clipping == "none" and flags.normalize_rewards
    assert "net" in image.chosen and "net" not in numbers.chosen
    assert numbers.learning_rate > image.learning_rate
    given = ppo_flags_of(OTHER, NUMBERS, "--reward_clipping", "none")
    assert not given.normalize_rewards
    given = ppo_flags_of(ATARI, IMAGE, "--normalize_rewards")
    assert given.reward_clipping == "none"


def test_monobeasts_impala_sees_large_images_with_a_shallow_net():
    """Its actors evaluate it alone. Of few pixels the deep one costs little, and learns
    MinAtar's games in a fraction of the steps."""
    for side, programs_net in (84, "shallow"), (19, "deep"):
        space = spaces.Box(0, 255, (side, side, 4), np.uint8)
        for program, net in (monobeast, programs_net), (polybeast, "deep"):
            flags = program.program_parser().parse_args(["--env", OTHER])
            program.set_defaults(flags)
            polybeast.Agent(flags, space, CHOICES)
            assert flags.net == net
    assert "net" not in flags_of(OTHER, NUMBERS, CHOICES).chosen
    both = spaces.Dict(board=SMALL_IMAGE, eye=IMAGE)
    assert flags_of(OTHER, both, CHOICES).net == "shallow"


def test_ppo_sees_small_images_with_a_small_net():
    assert ppo_flags_of(OTHER, SMALL_IMAGE).net == "small"
    for space in IMAGE, spaces.Dict(board=SMALL_IMAGE, eye=IMAGE):
        flags = ppo_flags_of(OTHER, space)
        assert (flags.net, flags.learning_rate) == ("nature", 2.5e-4)


@pytest.mark.parametrize("args", [[], ["--no-use_lstm"], ["--preset", "dqn"]])
def test_r2d2_sees_small_images_with_a_small_normalized_net(args):
    both = spaces.Dict(board=SMALL_IMAGE, eye=IMAGE)
    large = (IMAGE, "shallow"), (both, "shallow")
    for space, net in *large, (SMALL_IMAGE, "small"), (NUMBERS, None):
        agent, flags = r2d2_of(space, *args)
        assert flags.net == net
        norms = [x for x in agent.net.modules() if isinstance(x, nn.LayerNorm)]
        assert bool(norms) == bool(flags.layer_norm) == (space is SMALL_IMAGE)
    agent, _ = r2d2_of(SMALL_IMAGE, "--no-layer_norm", *args)
    assert not [x for x in agent.net.modules() if isinstance(x, nn.LayerNorm)]


def test_dqn_learns_from_one_reward_of_small_images():
    for space, n_step, epsilon in (SMALL_IMAGE, 1, 1e-5), (IMAGE, 3, 1e-3):
        _, dqn = r2d2_of(space, "--no-use_lstm")
        _, r2d2 = r2d2_of(space)
        assert (dqn.n_step, dqn.epsilon) == (n_step, epsilon)
        assert (r2d2.n_step, r2d2.epsilon) == (5, epsilon)
    _, preset = r2d2_of(SMALL_IMAGE, "--preset", "dqn")
    assert (preset.n_step, preset.epsilon) == (3, 7.8e-5)


def test_ppo_does_not_pay_for_the_entropy_of_gaussians():
    assert ppo_flags_of(OTHER, NUMBERS, action_space=BOX).entropy_cost == 0


@pytest.mark.parametrize(
    ("high", "dtype", "normalized"),
    [
        (512, np.float32, True),
        (30, np.float32, False),  # Acrobot's.
        (3e38, np.float32, False),  # It says nothing.
        (np.inf, np.float32, False),
        (512, np.int64, False),  # Networks get logarithms.
    ],
)
def test_r2d2_normalizes_numbers_that_may_be_large(high, dtype, normalized):
    low = -high if dtype == np.float32 else 0
    part = spaces.Box(low, high, (2,), dtype)
    for space in part, spaces.Dict(x=spaces.Tuple([BOX, part])):
        assert r2d2_of(space)[1].normalize_observations == normalized


@pytest.mark.parametrize("clipping", ["abs_one", "none"])
def test_rewards_with_a_flag_for_clipping_are_not_normalized(clipping):
    flags = flags_of(OTHER, NUMBERS, CHOICES, "--reward_clipping", clipping)
    assert flags.reward_clipping == clipping and not flags.normalize_rewards


@pytest.mark.parametrize("space", [IMAGE, NUMBERS])
@pytest.mark.parametrize("actions", [BOX, spaces.Tuple([CHOICES, BOX])])
def test_the_entropy_of_gaussians_is_not_paid_for(space, actions):
    assert flags_of(OTHER, space, actions).entropy_cost == 0
    assert flags_of(OTHER, space, CHOICES).entropy_cost > 0


def test_a_flag_that_is_given_wins():
    args = ["--entropy_cost", 0.5, "--no-normalize_observations", "--num_epochs", 2]
    flags = flags_of(OTHER, NUMBERS, BOX, *args)
    assert (flags.entropy_cost, flags.num_epochs) == (0.5, 2)
    assert not flags.normalize_observations
    assert flags.chosen.keys() == {
        "normalize_rewards", "reward_clipping", "vtrace_lambda", "learning_rate",
        "separate_value", "numbers_net", "baseline_cost",
    }  # fmt: skip


def test_ppos_advantages_of_numbers_look_further():
    for space, gae_lambda in (NUMBERS, 0.98), (IMAGE, 0.95), (SMALL_IMAGE, 0.95):
        assert ppo_flags_of(OTHER, space).gae_lambda == gae_lambda
    assert ppo_flags_of(OTHER, NUMBERS, "--preset", "mujoco").gae_lambda == 0.95


def test_what_was_chosen_is_printed_in_one_line_and_in_meta_json(tmp_path):
    args = ["--num_actors", 0, "--total_steps", 80, "--learning_rate", 0.1]
    args += ["--savedir", tmp_path, "--xpid", "x", "--env", "CartPole-v1"]
    result = main(*args)
    [line] = [x for x in result.stderr.splitlines() if "defaults for" in x]
    assert "CartPole-v1: " in line and "--normalize_rewards" in line
    assert "learning_rate" not in line
    flags = json.loads((tmp_path / "x" / "meta.json").read_text())["flags"]
    assert flags["normalize_rewards"] is True and flags["learning_rate"] == 0.1
    assert "clipped" not in result.stderr
    succeeds(*args, "--mode", "test", "--num_test_episodes", 1)


@pytest.mark.parametrize(
    "args", [["--preset", "a2c"], ["--reward_clipping", "abs_one"]]
)
def test_a_run_says_that_it_clips_rewards(tmp_path, args):
    args = [*args, "--num_actors", 0, "--total_steps", 80, "--savedir", tmp_path]
    assert "rewards are clipped to -1 to 1" in main("--env", OTHER, *args).stderr


def steps(space, T=3, B=2):
    observation = torch.as_tensor(np.stack([space.sample() for _ in range(T * B)]))
    return {
        "observation": observation.unflatten(0, (T, B)),
        "reward": torch.zeros(T, B),
        "done": torch.zeros(T, B, dtype=torch.bool),
        "last_action": torch.zeros(T, B, dtype=torch.int64),
    }


def test_of_numbers_the_value_has_a_network_of_its_own():
    net = polybeast.Agent(parse("--env", OTHER), NUMBERS, CHOICES).net
    net(steps(NUMBERS), ())[0]["baseline"].sum().backward()
    of_policy = [*net.policy.parameters(), *net.encoder.encoder.policy.parameters()]
    assert all(p.grad is None or not p.grad.any() for p in of_policy)
    assert all(p.grad.any() for p in net.encoder.encoder.value.parameters())


@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
def test_images_and_memory_have_one_network(lstm):
    space = NUMBERS if lstm else IMAGE
    agent = polybeast.Agent(parse("--env", OTHER, *lstm), space, CHOICES)
    state = agent.net.initial_state(2)
    agent.net(steps(space), state)[0]["baseline"].sum().backward()
    first = next(agent.net.encoder.parameters())
    assert first.grad.any()


def test_a_batch_is_learned_from_num_epochs_times():
    env = environment.Environment(Spread(1))
    _, *buffers = actor = make_actor(parse("--num_epochs", 3), env)
    batch = next(batches(*actor))
    agent = actor[0].agent
    agent.start_learning(torch.device("cpu"))
    agent.learn(batch)
    [count] = {int(x["step"]) for x in agent.optimizer.state.values()}
    assert (count, agent.updates) == (3, 1)


class Spread(VectorEnv):
    """PettingZoo's simple_spread without its collisions: three bodies with inertia are
    to cover three landmarks, each a row. All episodes are cut off after 25 steps."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Box(-np.inf, np.inf, (14,), np.float32)
    single_action_space = spaces.Discrete(5)
    forces = 0.5 * np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])

    def __init__(self, n):
        self.n, self.num_envs = n, 3 * n

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.x, self.landmarks = self.rng.uniform(-1, 1, (2, self.n, 3, 2))
        self.v, self.t = np.zeros((self.n, 3, 2)), 0
        return self.observations(), {}

    def step(self, actions):
        zeros = np.zeros(self.num_envs)
        if self.t == 25:
            return self.reset()[0], zeros, zeros > 0, zeros > 0, {}
        self.t += 1
        self.v = 0.75 * self.v + self.forces[actions].reshape(self.v.shape)
        self.x = self.x + 0.1 * self.v
        distances = np.linalg.norm(self.x[:, :, None] - self.landmarks[:, None], axis=3)
        rewards = np.repeat(-distances.min(1).sum(1), 3)
        last = np.full(self.num_envs, self.t == 25)
        return self.observations(), rewards, zeros > 0, last, {}

    def observations(self):
        x = self.x[:, :, None]  # [n, 3, 1, 2]
        others = (self.x[:, None] - x)[:, ~np.eye(3, dtype=bool)]
        parts = [self.v, self.x, self.landmarks[:, None] - x, others]
        parts = [part.reshape(self.num_envs, -1) for part in parts]
        return np.concatenate(parts, 1).astype(np.float32)


@pytest.mark.slow
def test_values_do_not_run_away_where_every_episode_is_cut_off():
    """They are bootstrapped from values of states that nothing else is learned about:
    with those of Atari, losses of 1e10 were seen in these 20,000 steps."""
    flags = parse("--env", OTHER, "--unroll_length", 20, "--total_steps", 40_000)
    env = environment.Environment(Spread(4))
    flags.envs_per_actor = env.num_envs
    actor, *buffers = make_actor(flags, env, seed=3)
    actor.agent.start_learning(torch.device("cpu"))
    losses = []
    for batch in batches(actor, *buffers):  # 12 rollouts each.
        for part in range(0, 12, 4):
            x = map_structure(lambda x, i=part: x[:, i : i + 4], batch)
            losses.append(float(actor.agent.learn(x)["baseline_loss"]))
        if len(losses) == 240:
            break
    assert max(losses[-100:]) < 1e5
