"""PettingZoo's environments of the Parallel API: agents are rows."""

import re
import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests import envs, parallel_envs, turn_envs
from tests.programs import args, both, main, poly_first, refusal, succeeds
from torchbeast import environment, play
from torchbeast.messages import BadInput, log
from torchbeast.remote import servers
from torchbeast.seeds import derive_seed
from torchbeast.spaces import BadStep
from torchbeast.vector import Separate

ENVS = "tests.parallel_envs:"
AGENTS = parallel_envs.Crowd.possible_agents
N = len(AGENTS)


def expected_steps(env, seed, actions):
    """The steps of the N rows of one environment, by a plain loop.

    actions: [T, N], of rows. Returns [[{field: value}]], of a step and a row.
    """
    begun, score, length = set(), {}, {}
    steps, metrics = [], []

    def give(agent, done, observations, infos, **others):
        there = agent in begun
        x = observations.get(agent)
        mask = np.ones(5)
        if not there:
            score[agent], length[agent] = 0, 0
        elif isinstance(x, dict):
            x, mask = x["seen"], x["action_mask"]
        elif env.masks == "info":
            mask = infos[agent].get("action_mask", mask)
        ends = others.get("terminated", False) or others.get("truncated", False)
        return {
            "observation": x if there else np.zeros(4),
            "reward": 0.0,
            "done": done,
            "terminated": False,
            "truncated": False,
            "last_action": 0,
            "episode_end": ends,
            "episode_step": length[agent],
            "episode_return": score[agent],
            "training_episode_return": score[agent],
            "action_mask": mask if any(mask) else np.ones(5),
            **others,
        }

    def begin(agent):
        begun.add(agent)
        score[agent], length[agent] = 0, 0

    def reset(seed=None):
        observations, infos = env.reset(seed)
        begun.clear()
        for agent in env.agents:
            begin(agent)
        steps.append([give(a, True, observations, infos) for a in AGENTS])

    reset(seed)
    for action in actions:
        if not env.agents:
            reset()
            continue
        before = list(env.agents)
        given = {a: x for a, x in zip(AGENTS, action) if a in before}
        observations, rewards, terminated, truncated, infos = env.step(given)
        step = []
        for agent in AGENTS:
            if agent in before:
                score[agent] += rewards[agent]
                length[agent] += 1
                fields = {
                    "reward": rewards[agent],
                    "last_action": given[agent],
                    "terminated": terminated[agent],
                    "truncated": truncated[agent] and not terminated[agent],
                }
                step.append(give(agent, False, observations, infos, **fields))
                if terminated[agent] or truncated[agent]:
                    begun.discard(agent)
                    metrics.append(infos[agent]["episode_metrics"])
            else:
                if agent in env.agents:
                    begin(agent)
                step.append(give(agent, True, observations, infos))
        steps.append(step)
    return steps, metrics


@pytest.mark.parametrize("masks", [None, "observation", "info"])
def test_each_step_of_each_agent_is_that_of_a_plain_loop(masks):
    E, T = 3, 150
    env = environment.Environment(environment.make(ENVS[:-1], E, masks=masks))
    assert (env.num_envs, env.num_agents, env.name) == (E * N, N, "crowd_v0")
    steps, actions, rng = [env.initial(5)], [], np.random.default_rng(0)
    for _ in range(T):
        scores = rng.random((E * N, 5)) * steps[-1].get("action_mask", 1)
        actions.append(scores.argmax(1))
        steps.append(env.step(actions[-1]))
    if masks == "observation":
        for step in steps:
            step["observation"] = step["observation"]["seen"]
    given, metrics = env.take_metrics(), []
    found = {name: np.array([x[name] for x in steps]) for name in steps[0]}
    for e in range(E):
        rows = slice(e * N, (e + 1) * N)
        own = [x[rows] for x in actions]
        script = parallel_envs.Crowd(masks)
        expected, ages = expected_steps(script, derive_seed(5, e), own)
        metrics += ages
        for name, x in found.items():
            of_agents = np.array([[row[name] for row in step] for step in expected])
            np.testing.assert_array_equal(x[:, rows], of_agents, name)
    ages = [x["age"] for x in given]
    assert sorted(ages) == sorted(x["age"] for x in metrics)
    assert ("action_mask" in found) == (masks is not None)
    done, last = found["done"], found["terminated"] | found["truncated"]
    assert (done[1:] & done[:-1]).any() and last.any() and (last.sum(1) == 1).any()


def test_steps_that_were_given_do_not_change():
    env = environment.Environment([parallel_envs.Crowd() for _ in range(2)])
    given = [env.initial(0)]
    before = [{k: x.copy() for k, x in given[0].items()}]
    for _ in range(30):
        given.append(env.step(env.some_action()))
        before.append({k: x.copy() for k, x in given[-1].items()})
    for x, y in zip(given, before):
        for name in x:
            np.testing.assert_array_equal(x[name], y[name])


def test_pettingzoo_itself_accepts_the_environments_of_these_tests():
    test = pytest.importorskip("pettingzoo.test")
    for env in (parallel_envs.Targets(), parallel_envs.Steady()):
        test.parallel_api_test(env, 100)
    for masks in (None, "observation"):
        test.parallel_api_test(parallel_envs.Crowd(masks), 100)


def test_each_copy_has_a_seed_of_its_own():
    env = environment.Environment([parallel_envs.Targets() for _ in range(8)])
    first = env.initial(1)["observation"].reshape(8, 3)
    assert len(np.unique(first, axis=0)) > 3
    np.testing.assert_array_equal(env.initial(1)["observation"].reshape(8, 3), first)


def steps_of(cls, num_envs=2, num_steps=20):
    """Makes steps of an environment whose second copy has the fault."""
    others = [parallel_envs.Steady(masks=cls().masks) for _ in range(num_envs - 1)]
    env = environment.Environment([*others, cls()])
    env.initial(0)
    for _ in range(num_steps):
        env.step(env.some_action())


@pytest.mark.parametrize("cls", parallel_envs.BEFORE, ids=lambda c: c.__name__)
def test_what_no_policy_fits_is_refused_by_name(cls):
    with pytest.raises(BadInput) as e:
        environment.Environment([cls()])
    assert re.search("".join(cls.__doc__.split("\n    ")), str(e.value))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("cls", parallel_envs.AT_A_STEP, ids=lambda c: c.__name__)
def test_a_fault_names_environment_and_agent(cls):
    with pytest.raises((BadStep, BadInput), match=cls.__doc__) as e:
        steps_of(cls)
    assert "\n" not in str(e.value)


def test_the_steps_that_faults_change_are_good():
    steps_of(parallel_envs.Steady)


class Told(parallel_envs.Crowd):
    """Agents that observe a text before what they see."""

    def observation_space(self, agent):
        return spaces.Tuple([spaces.Text(9), super().observation_space(agent)])

    def observe(self, *args):
        observations, *others = super().observe(*args)
        return {a: ("a text", x) for a, x in observations.items()}, *others


class SeesTooMuch(Told):
    def observe(self, *args):
        observations, *others = super().observe(*args)
        last = max(observations)
        observations[last] = ("a text", np.zeros(9, np.float32))
        return observations, *others


def test_agents_that_are_out_have_no_text_either():
    env, plain = (
        environment.Environment([cls()]) for cls in (Told, parallel_envs.Crowd)
    )
    assert env.texts == ["observation/0"]
    step, expected = env.initial(1), plain.initial(1)
    for _ in range(50):
        np.testing.assert_array_equal(step["observation"][0], expected["observation"])
        step, expected = env.step(env.some_action()), plain.step(plain.some_action())


def test_whose_observation_is_wrong_is_named_where_others_have_texts():
    env = environment.Environment([SeesTooMuch()])
    message = r"agent 'dan' .*: observation/1 is float32 \[9\]"
    with pytest.raises(BadStep, match=message):
        env.initial(1)


def test_copies_with_other_agents_are_refused():
    with pytest.raises(BadInput, match=r"agents \['here', 'gone'\], and had \['ann'"):
        environment.Environment([parallel_envs.Crowd(), parallel_envs.Gone()])


def test_an_environment_of_gymnasium_stays_one_whatever_it_has():
    class Team(envs.Counter):
        possible_agents = ["a", "b"]

    env = environment.Environment([Team(), Team()])
    assert isinstance(env.env, Separate) and (env.num_envs, env.num_agents) == (2, 1)


def test_an_environment_without_a_close_is_closed_without_a_word(caplog, monkeypatch):
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.delattr(parallel_envs.Crowd, "close")
    environment.Environment([parallel_envs.Crowd()]).close()
    assert caplog.text == ""


def test_a_vector_environment_says_how_many_agents_an_environment_has():
    vector = envs.MockVector(6)
    vector.num_agents = 2
    assert environment.Environment(vector).num_agents == 2


# --env


def test_a_module_or_a_name_in_it_is_an_environment(monkeypatch):
    for env_id in (ENVS[:-1], ENVS + "parallel_env", ENVS + "Crowd"):
        made = environment.make(env_id, 2, "rgb_array", masks="info")
        assert [x.masks for x in made] == ["info", "info"]
        assert isinstance(made[0], parallel_envs.Crowd)
        assert made[0].render_mode == "rgb_array"
    by_id = {"zoo/crowd-v0": parallel_envs.Crowd}
    zoo = types.ModuleType("pettingzoo")
    zoo.parallel_registry, zoo.make = by_id, lambda kind, name: by_id[name]()
    monkeypatch.setitem(sys.modules, "pettingzoo", zoo)
    [made] = environment.make("pettingzoo:zoo/crowd-v0")
    assert isinstance(made, parallel_envs.Crowd)
    with pytest.raises(BadInput, match=r"did you mean pettingzoo:zoo/crowd-v0\?$"):
        environment.make("pettingzoo:zoo/crowd-v1")


def test_who_gives_an_argument_that_there_is_not_is_not_told_to_give_it():
    with pytest.raises(BadInput, match="unexpected keyword argument 'size'$"):
        environment.make(ENVS + "Crowd", size=3)


def test_what_is_registered_with_gymnasium_wins(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Crowd", entry_point=envs.Counter)
    monkeypatch.setitem(gymnasium.registry, "Crowd", spec)
    [env] = environment.make(ENVS + "Crowd")
    assert isinstance(env.unwrapped, envs.Counter)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        (ENVS + "Nobody", "unknown environment 'tests.parallel_envs:Nobody'"),
        ("tests.envs:Catch", "unknown environment 'tests.envs:Catch'"),
        ("tests.envs", "unknown environment 'tests.envs'"),
        ("nothing_at_all", "unknown environment 'nothing_at_all'"),
        ("tests.nothing", "'tests.nothing' cannot be made: No module named 'tests.no"),
        ("string:capwords", "cannot be made: capwords.* missing 1 required"),
        ("os:getcwd", "'os:getcwd' is a str, expected an environment of Pet"),
    ],
)
def test_what_is_no_environment_is_named(env_id, message):
    with pytest.raises(BadInput, match=message):
        environment.make(env_id)


def test_an_aec_environment_that_is_parallelizable_is_converted():
    conversions = pytest.importorskip("pettingzoo.utils.conversions")
    aec = conversions.parallel_to_aec_wrapper(parallel_envs.Targets())
    turns, other = map(environment.Environment, ([aec], [parallel_envs.Targets()]))
    step, expected = turns.initial(0), other.initial(0)
    for t in range(30):
        for name in step:
            np.testing.assert_array_equal(step[name], expected[name])
        action = step["observation"] * (t % 5 > 0)  # Nearly always right.
        step, expected = turns.step(action), other.step(action)


def test_without_pettingzoo_one_that_is_parallelizable_is_one_line(monkeypatch):
    env = turn_envs.Answer()
    env.metadata = {**(env.metadata or {}), "is_parallelizable": True}
    monkeypatch.setitem(sys.modules, "pettingzoo.utils.conversions", None)
    with pytest.raises(BadInput, match="needs: pip install pettingzoo"):
        environment.Environment([env])


# The programs.

SOME = parallel_envs.SpacesChange, parallel_envs.NoReward, parallel_envs.AllowsNothing
BY_TURNS = (
    turn_envs.RaisesInLast,
    turn_envs.Stranger,
    turn_envs.AllowsNothing,
    turn_envs.StaysAfterItsEnd,
)
IN_BOTH = parallel_envs.SpacesChange, turn_envs.RaisesInLast


def small(module, savedir, *others, env, steps=800):
    """4 rows are what the programs' smallest runs have room for."""
    return args(module, savedir, *others, env=ENVS + env, steps=steps)


@poly_first
def test_agents_that_come_and_go_are_learned_from_and_tested(module, savedir):
    flags = small(module, savedir, "--env_args", "masks='info'", env="Crowd")
    assert "both are learned from" not in succeeds(*flags, module=module).stderr
    video = savedir / "x.mp4"
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 3
    result = succeeds(*test, "--video", video, module=module)
    assert result.stdout.count("return ") == 4 and "mean age" in result.stdout
    assert video.stat().st_size > 0


def test_a_game_in_a_test_is_as_long_as_its_longest_agents_episode():
    class Late(parallel_envs.Pair):
        """Ann plays 10 steps, bob the steps 9 to 12."""

        def reset(self, seed=None, options=None):
            self.t, self.agents = 0, ["ann"]
            return {"ann": np.zeros(4, np.float32)}, {}

        def step(self, actions):
            self.t += 1
            ends = {a: self.t == (10 if a == "ann" else 12) for a in self.agents}
            rewards = dict.fromkeys(self.agents, 1.0)
            joined = ["bob"] if self.t == 8 else []
            self.agents = [a for a in ends if not ends[a]] + joined
            seen = dict.fromkeys([*ends, *joined], np.zeros(4, np.float32))
            return seen, rewards, ends, dict.fromkeys(ends, False), {}

    env = environment.Environment([Late()])
    flags = types.SimpleNamespace(video=None, seed=1, num_test_episodes=2)
    games = play.episodes(flags, env, lambda step: np.zeros(2, np.int64))
    assert list(games) == [(7, 10), (7, 10)]


def test_a_test_does_not_wait_for_an_agent_that_is_never_there():
    env = environment.Environment([parallel_envs.Gone()])
    flags = types.SimpleNamespace(video=None, seed=0, num_test_episodes=5)
    played = list(play.episodes(flags, env, lambda step: env.some_action()))
    metrics = [x["age"] for x in env.take_metrics()]  # One agent's each.
    assert [length for _, length in played] == metrics
    assert not np.isnan([score for score, _ in played]).any()


@both
@pytest.mark.parametrize("cls", parallel_envs.BEFORE, ids=lambda c: c.__name__)
def test_a_program_refuses_by_one_line(module, savedir, cls):
    flags = small(module, savedir, env=cls.__name__)
    line = refusal(*flags, module=module)
    assert re.search("".join(cls.__doc__.split("\n    ")), line)


@both
@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(x, marks=pytest.mark.slow if x in IN_BOTH else pytest.mark.long)
        for x in (*SOME, *BY_TURNS)
    ],
)
def test_a_fault_ends_a_program_with_its_line(module, savedir, cls, monkeypatch):
    monkeypatch.setattr(servers, "MAX_FAILURES", 2)
    restarts = ("--max_actor_restarts", 1) if module == "monobeast" else ()
    env = f"{cls.__module__}:{cls.__name__}"
    flags = args(module, savedir, *restarts, env=env)
    result = main(*flags, module=module)
    assert result.returncode in (1, 2), result.stderr
    text = cls.__doc__.replace("environment 1", r"environment \d")
    assert re.search(text, result.stderr), result.stderr
