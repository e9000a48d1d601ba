"""Vector environments that reset within the step of an end, and those that say so
wrongly."""

import functools
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from tests import envs
from torchbeast.environment import Environment, probe
from torchbeast.messages import BadInput, log

E = 4


class Script(gymnasium.Env):
    """Random episodes of 1 to 4 steps, that end in every way; with lives, every other
    one does not end the reported episode. Observes (episode, step in it, action that
    led here)."""

    observation_space = spaces.Box(-1, 10**6, (3,), np.int64)
    action_space = spaces.Discrete(10)

    def __init__(self, seed, lives):
        self.rng = np.random.default_rng(seed)
        self.lives = lives
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.t, self.length = 0, self.rng.integers(1, 5)
        return np.array([self.episode, 0, -1]), {"episode_metrics": {"wrong": 1}}

    def step(self, action):
        self.t += 1
        reward, way = float(self.rng.integers(-1000, 1000)), self.rng.integers(3)
        last = self.t == self.length
        terminated, truncated = last and way < 2, last and way > 0
        info = {}
        if last:
            info["episode_end"] = not (self.lives and self.rng.integers(2))
            info["episode_metrics"] = {"episode": float(self.episode)}
        observation = np.array([self.episode, self.t, action])
        return observation, reward, terminated, truncated, info


def expected_steps(script, actions):
    """The steps of one environment, by a plain loop, and the metrics of its episodes.
    After an end the script makes the step that nobody sees."""
    steps, metrics = [], []
    score, length, training_score = 0.0, 0, 0.0
    reported_end = last = False

    def give(observation, reward=0.0, done=False, terminated=False, truncated=False):
        steps.append(
            {
                "observation": observation,
                "reward": reward,
                "done": done,
                "terminated": terminated,
                "truncated": truncated and not terminated,
                "last_action": 0 if done else action,
                "episode_end": reported_end,
                "episode_step": length,
                "episode_return": score,
                "training_episode_return": training_score,
            }
        )

    action = 0
    observation, _ = script.reset()
    give(observation, done=True)
    for action in actions:
        begins = reported_end
        if begins:
            score, length = 0.0, 0
        result = script.step(0 if last else action)
        observation, reward, terminated, truncated, info = result
        ends = terminated or truncated
        reported_end = bool(ends and info["episode_end"])
        if last and ends and begins:  # Nothing of this episode is shown.
            reported_end = False
        else:
            score, length = score + reward, length + 1
            if reported_end:
                metrics.append(info["episode_metrics"])
        if last:
            training_score, last = 0.0, False
            give(script.reset()[0] if ends else observation, done=True)
        else:
            training_score += reward
            give(observation, reward, False, terminated, truncated)
            if ends:
                last = True
                script.reset()
    return steps, metrics


@pytest.mark.parametrize("lives", [False, True])
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
def test_what_resets_within_the_step_gives_every_transition_but_the_first(
    vector, lives
):
    scripts = [functools.partial(Script, e, lives) for e in range(E)]
    env = Environment(vector(scripts, autoreset_mode=AutoresetMode.SAME_STEP))
    actions = np.random.default_rng(0).integers(10, size=(300, E))
    steps = [env.initial(0), *map(env.step, actions)]
    all_metrics, seen = [], {"terminated": 0, "truncated": 0, "episode_end": 0}
    for e in range(E):
        expected, metrics = expected_steps(Script(e, lives), actions[:, e])
        all_metrics += metrics
        assert len(steps) == len(expected)
        for t, (step, row) in enumerate(zip(steps, expected)):
            for name, x in row.items():
                np.testing.assert_array_equal(
                    step[name][e], x, err_msg=f"{name} of step {t} of {e}"
                )
                if name in seen:
                    seen[name] += np.sum(x)
    assert min(seen.values()) > 50, seen

    def key(metrics):
        return metrics["episode"]

    assert sorted(env.take_metrics(), key=key) == sorted(all_metrics, key=key)
    env.close()


def test_each_shown_episode_of_one_step_is_whole():
    """Its transition is learned from, as no step goes before what follows an unseen
    episode."""
    env = Environment(
        SyncVectorEnv([envs.Bandit], autoreset_mode=AutoresetMode.SAME_STEP)
    )
    step, returns = env.initial(0), []
    for _ in range(40):
        right = (step["observation"] + 1) % 4
        step = env.step(right)
        if step["episode_end"]:
            returns.append(step["training_episode_return"].item())
            assert step["terminated"] and not step["done"]
        else:
            assert step["done"] and step["episode_step"] == 0
    assert returns == 20 * [1.0]


class Nested(gymnasium.Env):
    """Episodes of three steps. Every entry of an observation is the step."""

    observation_space = spaces.Dict(
        a=spaces.Tuple([spaces.Discrete(9), spaces.Box(0, 9, (2,), np.float32)]),
        b=spaces.Dict(c=spaces.Box(0, 9, (), np.float64)),
        text=spaces.Text(5),
    )
    action_space = spaces.Dict(
        x=spaces.Discrete(3, start=5), y=spaces.Box(1, 3, (2,), np.float32)
    )

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation(), 0.0, False, self.t == 3, {}

    def observation(self):
        t = self.t
        a = t, np.full(2, t, np.float32)
        return {"a": a, "b": {"c": np.array(float(t))}, "text": "go"}


class Batched(gymnasium.vector.VectorWrapper):
    """Gives the last observations as others do: as one observation of arrays."""

    def step(self, actions):
        *result, info = super().step(actions)
        if "final_obs" in info:
            final = [x for x in info["final_obs"] if x is not None]
            space = self.single_observation_space
            info["final_obs"] = gymnasium.vector.utils.concatenate(
                space, final, gymnasium.vector.utils.create_empty_array(space, E)
            )
        return *result, info


@pytest.mark.parametrize("wrap", [lambda env: env, Batched])
def test_last_observations_may_be_nested(wrap):
    vector = SyncVectorEnv(E * [Nested], autoreset_mode=AutoresetMode.SAME_STEP)
    env = Environment(wrap(vector))
    step, seen = env.initial(0), []
    for _ in range(8):
        observation = step["observation"]
        seen.append(int(observation["a"][0][0]))
        np.testing.assert_array_equal(observation["a"][0], np.full(E, seen[-1]))
        np.testing.assert_array_equal(observation["a"][1], np.full((E, 2), seen[-1]))
        np.testing.assert_array_equal(observation["b"]["c"], np.full(E, seen[-1]))
        step = env.step({"x": np.full(E, 2), "y": np.full((E, 2), 2, np.float32)})
    assert seen == [0, 1, 2, 3, 1, 2, 3, 1]


class Liar(VectorEnv):
    """Episodes of `length` steps; resets within the step, and says otherwise."""

    single_observation_space = spaces.Box(0, 100, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    num_envs = 2

    def __init__(self, mode, length=3, info=None, reward=0.0):
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.length, self.info, self.reward = length, info, reward

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation(), {}

    def step(self, actions):
        self.t += 1
        last = np.full(2, self.t == self.length)
        self.t %= self.length
        info = self.info if last.any() and self.info is not None else {}
        return self.observation(), np.full(2, self.reward), last, last & False, info

    def observation(self):
        return np.full((2, 1), self.t, np.float32)


NO_FINAL = [{"terminal_observation": np.zeros(1)}, {}]  # SuperSuit's infos.


@pytest.mark.survives("environment-hides-its-ends")
@pytest.mark.parametrize(
    "options, words",
    [
        (dict(info={"final_obs": np.zeros((2, 1))}), "info has 'final_obs'"),
        (dict(info={"final_observation": [0]}), "info has 'final_observation'"),
        (dict(info=NO_FINAL), "info has 'terminal_observation'"),
        (dict(length=1), "ended at the step that was to begin it"),
    ],
    ids=["final_obs", "final_observation", "terminal_observation", "length"],
)
def test_what_resets_within_the_step_but_states_the_next_is_refused(options, words):
    env = Environment(Liar(AutoresetMode.NEXT_STEP, **options))
    env.initial()
    with pytest.raises(BadInput, match=f"Liar states .*NEXT_STEP.*{words}") as error:
        for _ in range(5):
            env.step([0, 0])
    assert "\n" not in str(error.value)


def test_a_reward_at_a_reset_is_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    env = Environment(Liar(AutoresetMode.NEXT_STEP, reward=1.0))
    env.initial()
    for _ in range(9):
        env.step([0, 0])
    assert caplog.text.count("pays 1 at the step after an episode's end") == 1


def test_what_resets_within_the_step_but_hides_the_last_observation_is_refused():
    env = Environment(Liar(AutoresetMode.SAME_STEP))
    env.initial()
    with pytest.raises(BadInput, match=r"SAME_STEP.*without info\['final_obs'\]"):
        for _ in range(3):
            env.step([0, 0])


def test_a_program_says_what_a_reset_within_the_step_costs(caplog, monkeypatch):
    monkeypatch.setattr(log, "handlers", [caplog.handler])

    def create_env(flags, num_envs, render_mode, seed):
        return Environment(Liar(AutoresetMode[flags.env]))

    for mode in ("NEXT_STEP", "SAME_STEP"):
        assert not caplog.text
        probe(create_env, types.SimpleNamespace(env=mode), 2)
    assert "Liar resets within the step" in caplog.text


@pytest.mark.parametrize("mode", [None, "sometimes", AutoresetMode.DISABLED])
def test_what_does_not_state_a_mode_that_is_known_is_refused(mode):
    with pytest.raises(BadInput, match="Liar states .*autoreset mode.*NEXT_STEP"):
        Environment(Liar(mode))
