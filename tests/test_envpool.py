"""EnvPool's environments: the package's own, and one with the same attributes."""

import sys
import types
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import monobeast
import polybeast_env
from tests import faulty_envs
from tests.programs import SERIAL, args, main, refusal, succeeds
from torchbeast.environment import Environment, make
from torchbeast.messages import BadInput
from torchbeast.remote import server
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.protocol import PROTOCOL_VERSION
from torchbeast.seeds import derive_seed


class FakePool(VectorEnv):
    """Has what EnvPool 1.2.5 has: a spec without id, from which it takes its spaces; a
    seed that counts when it is made, not at reset(); next-step autoreset."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = property(lambda self: self.spec.observation_space)
    single_action_space = property(lambda self: self.spec.action_space)

    def __init__(self, num_envs, seed=42, render_mode=None):
        space = spaces.Box(-1, 1, (4,), np.float32)
        actions = spaces.Discrete(2)
        self.spec = types.SimpleNamespace(observation_space=space, action_space=actions)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        self.t = np.zeros(self.num_envs, int)
        self.length = self.rng.integers(5, 30, self.num_envs)
        return self.observation(), {"elapsed_step": self.t.copy()}

    def step(self, actions):
        begins = self.t == self.length
        self.t = np.where(begins, 0, self.t + 1)
        rewards = np.where(begins, 0, 1).astype(np.float32)
        info = {"elapsed_step": self.t.copy(), "env_id": np.arange(self.num_envs)}
        last = self.t == self.length
        return self.observation(), rewards, last, np.zeros_like(last), info

    def observation(self):
        return self.rng.uniform(-1, 1, (self.num_envs, 4)).astype(np.float32)

    def render(self):
        return np.zeros((1, 8, 8, 3), np.uint8)


REAL = "envpool:CartPole-v1"  # It is what make test-slow installs.


@pytest.fixture(params=["Pool-v0", pytest.param(REAL, marks=pytest.mark.slow)])
def pool(request, monkeypatch):
    """The id of an environment that is a vector alone."""
    spec = gymnasium.envs.registration.EnvSpec("Pool-v0", vector_entry_point=FakePool)
    monkeypatch.setitem(gymnasium.registry, "Pool-v0", spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # EnvPool's, of its bounds.
        yield request.param


def test_its_steps_are_those_of_one_episode_after_the_other(pool):
    env = Environment(make(pool, 3, None, 5))
    assert env.name.endswith("Pool")
    step, length, ends = env.initial(1), np.zeros(3, int), 0
    for t in range(200):
        last = step["terminated"] | step["truncated"]
        step = env.step(np.full(3, t % 2))
        np.testing.assert_array_equal(step["done"], last)
        np.testing.assert_array_equal(step["reward"], ~last)
        length = np.where(last, 0, length + 1)
        np.testing.assert_array_equal(step["episode_step"], length)
        np.testing.assert_array_equal(step["episode_return"], length)
        ends += last.sum()
    assert ends > 10


def test_the_first_observations_of_all_seeds_are_different(pool):
    # EnvPool's i-th environment has seed + i.
    observations = [
        Environment(make(pool, 2, None, derive_seed(i))).initial()["observation"]
        for i in range(4)
    ]
    assert len({x.tobytes() for x in np.concatenate(observations)}) == 8


def test_a_single_one_is_made_and_rendered(pool):
    env = Environment(make(pool, 1, "rgb_array"))
    env.initial(0)
    assert env.render().ndim == 3


def test_each_stream_of_a_server_has_other_environments(pool):
    """Also each connection of a stream."""
    flags = polybeast_env.parser().parse_args(["--env", pool, "--envs_per_server", "2"])
    seen = set()
    for stream, connection in [(0, 0), (0, 1), (1, 0)]:
        hello = pb.Hello(
            version=PROTOCOL_VERSION, seed=3, stream=stream, connection=connection
        )
        request = pb.Request(hello=hello).SerializeToString()
        responses = server.converse(
            polybeast_env.create_env, flags, iter([request]), "peer"
        )
        response = pb.Response.FromString(next(responses))
        seen.add(response.step.data[0])
        responses.close()
    assert len(seen) == 3


@pytest.mark.slow
def test_without_a_seed_each_has_other_episodes():
    observations = [
        Environment(make(REAL, 2)).initial()["observation"].tobytes() for _ in range(3)
    ]
    assert len(set(observations)) == 3


def test_each_has_one_thread_and_a_seed(monkeypatch):
    made = []

    def make_gymnasium(task, num_envs, seed, **kwargs):
        made.append((task, num_envs, seed, kwargs))
        return FakePool(num_envs, seed)

    pool = types.ModuleType("envpool")
    pool.list_all_envs, pool.make_gymnasium = lambda: ["Walk-v4"], make_gymnasium
    monkeypatch.setitem(sys.modules, "envpool", pool)
    Environment(make("envpool:Walk-v4", 3, None, 7)).initial()
    make("envpool:Walk-v4", 1, "rgb_array", 8, num_threads=4)
    assert made == [
        ("Walk-v4", 3, 7, dict(num_threads=1)),
        ("Walk-v4", 1, 8, dict(num_threads=4, render_mode="rgb_array")),
    ]
    with pytest.raises(BadInput, match="'envpool:Wlk-v4': did you mean envpool:Walk-"):
        make("envpool:Wlk-v4")


@pytest.mark.slow
def test_a_flag_names_it(savedir):
    flags = args("monobeast", savedir, env=REAL, steps=200)
    succeeds(*flags)
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 2
    result = main(*test)
    assert result.returncode == 0 and "2 episodes:" in result.stdout, result.stderr
    line = refusal(*flags, "--env", "envpool:CartPol-v1", "--xpid", "y")
    assert "did you mean envpool:CartPole-v1, " in line
    line = refusal(*flags, "--env_args", "nonsense=3", "--xpid", "y")
    assert "cannot be made" in line and "'nonsense'" in line


def test_an_argument_of_the_user_comes_before_the_seed(pool):
    given, same = (
        Environment(make(pool, 2, None, seed, seed=7)).initial()["observation"]
        for seed in (1, 2)
    )
    np.testing.assert_array_equal(given, same)


def test_a_vector_without_the_argument_gets_no_seed(monkeypatch):
    made = []

    def entry_point(num_envs):
        made.append(num_envs)
        return FakePool(num_envs)

    spec = gymnasium.envs.registration.EnvSpec(
        "NoSeed-v0", entry_point=faulty_envs.Base, vector_entry_point=entry_point
    )
    monkeypatch.setitem(gymnasium.registry, "NoSeed-v0", spec)
    make("NoSeed-v0", 4, None, 3)
    assert made == [4]
    assert isinstance(make("NoSeed-v0", 1, None, 3), list)


def test_actors_of_monobeast_have_different_environments(monkeypatch):
    class Made(Exception):
        pass

    def create_env(flags, num_envs, render_mode, seed):
        raise Made(seed)

    monkeypatch.setattr(polybeast_env, "create_env", create_env)
    flags = types.SimpleNamespace(env="Pool-v0", envs_per_actor=2)
    for seed in (1, 2):
        with pytest.raises(Made, match=rf"^{seed}\b"):
            monobeast.act(flags, seed, None, None, None)


def test_a_resumed_run_of_one_thread_has_other_environments(tmp_path, monkeypatch):
    seeds, create_env = [], polybeast_env.create_env

    def record(flags, num_envs, render_mode, seed):
        seeds.append(seed)
        return create_env(flags, num_envs, render_mode, seed)

    monkeypatch.setattr(polybeast_env, "create_env", record)
    for steps in (80, 160):
        flags = ("--env", "CartPole-v1", "--savedir", tmp_path, "--xpid", "x")
        succeeds(*flags, *SERIAL, "--seed", 1, "--total_steps", steps)
    assert seeds[::2] == [None, None]  # What their steps look like.
    assert len(set(seeds[1::2])) == 2
