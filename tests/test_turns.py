"""PettingZoo's environments of the AEC API: agents act by turns."""

import contextlib
import functools
import itertools
import re
import threading
import types

import numpy as np
import pytest
import torch

import polybeast
from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher
from tests import turn_envs
from tests.programs import args, mono_first, poly_first, read_logs, succeeds
from tests.test_agent import make_actor, parse
from tests.test_polybeast_env import free_port, servers
from torchbeast import actors, environment, learner, machine, play, rollouts
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.remote.server import Statistics
from torchbeast.seeds import derive_seed
from torchbeast.spaces import BadStep

ENVS = "tests.turn_envs:"
T, E = 5, 2
CPU = torch.device("cpu")


def played(env, agent, seed, num_steps):
    """The steps of each possible agent, by a plain loop, until all have so many: {name:
    [(step, outputs, core_state before the step)]}, without dimensions of time and
    batch."""
    result = {name: [] for name in env.possible_agents}
    states = {name: agent.initial_state(1) for name in result}
    env.reset(seed)
    while min(map(len, result.values())) < num_steps:
        score, length, action = {}, {}, {}
        for name in env.agent_iter():
            x, reward, terminated, truncated, info = env.last()
            ends, begins = terminated or truncated, name not in score
            if ends and begins:  # It never had a turn.
                env.step(None)
                continue
            mask = np.ones(5)
            if env.masks == "observation":
                mask, x = x["action_mask"], {"seen": x["seen"]}
            elif env.masks == "info":
                mask = info.get("action_mask", mask)
            score[name] = score.get(name, 0) + reward
            length[name] = length.get(name, -1) + 1
            step = {
                "observation": x,
                "reward": np.float32(0 if begins else reward),
                "done": begins,
                "terminated": terminated,
                "truncated": truncated and not terminated,
                "last_action": 0 if begins else action[name],
                "episode_end": ends,
                "episode_step": length[name],
                "episode_return": np.float32(score[name]),
                "waits": False,
            }
            if env.masks is not None:
                step["action_mask"] = (mask if any(mask) else np.ones(5)).astype(bool)
            given = map_structure(lambda x: torch.as_tensor(x)[None, None], step)
            del given["waits"]
            outputs, after = agent.act(given, states[name])
            outputs = map_structure(lambda x: x[0, 0].numpy(), outputs)
            result[name].append((step, outputs, states[name]))
            states[name], action[name] = after, int(outputs["action"])
            env.step(None if ends else action[name])
        env.reset()
    return result


def make_agent(env, *flags):
    """An agent that acts by its network alone, so that a plain loop can do the same."""
    flags = parse("--use_lstm", *flags)
    torch.manual_seed(0)
    agent = polybeast.Agent(flags, env.observation_space, env.action_space)
    agent.net.eval()
    agent.act = functools.partial(agent.act, greedy=True)
    return agent


def make_env(cls=turn_envs.Table, masks=None):
    return environment.Environment([cls(masks) for _ in range(E)])


def check_rollout(rollout, steps):
    """Compares a rollout with some steps of played()."""
    found, n = map_structure(lambda x: x.numpy()[:, 0], rollout), len(steps)
    expected, outputs, (core_state, *_) = (list(x) for x in zip(*steps))
    for nests in expected, outputs[:-1]:
        stacked = map_structure(lambda *xs: np.stack(xs), *nests)
        for name, nest in stacked.items():
            for (path, x), (_, y) in zip(leaves(found[name], name), leaves(nest)):
                x = x[: len(nests)]
                if y.dtype == np.float32:
                    np.testing.assert_allclose(x, y, 1e-4, 1e-5, err_msg=path)
                else:
                    np.testing.assert_array_equal(x, y, path)
    for x, y in zip(found["core_state"], core_state):
        np.testing.assert_allclose(x, y[:, 0], 1e-4, 1e-5)
    for _, x in leaves(rollout.get("mask", ())):
        assert x[:, 0].tolist() == n * [True] + (T + 1 - n) * [False]


def check_rollouts(found, script, agent, seed, windows):
    """Compares all rollouts of the rows of E environments with a plain loop.

    windows: a function of an agent's steps and number of rollouts that returns a list
        of [begin, end], those of its rollouts; or K: they have T + K + 1 steps, and
        those of two overlap by no more than K + 1.
    """
    found = [map_structure(lambda x, i=i: x[:, i : i + 1], r) for r in found
             for i in range(r["done"].shape[1])]  # fmt: skip

    def seen(rollout):
        [(_, x)] = leaves(rollout["observation"])
        return x[:, 0].numpy()

    def what(x):
        return x["seen"] if isinstance(x, dict) else x

    num_found = 0
    for e in range(E):
        own_seed = derive_seed(seed, e)
        mine = [r for r in found if seen(r)[0, 0] == own_seed % 1000]
        last = max(tuple(seen(r)[-1, 1:3]) for r in mine)
        num = 50
        while True:
            expected = played(script(), agent, own_seed, num)
            if min(tuple(what(s[-1][0]["observation"])[1:3]) for s in expected.values()
                   ) > last:  # fmt: skip
                break
            num *= 2
        for i, steps in enumerate(expected.values()):
            own = [r for r in mine if seen(r)[0, 3] == i]
            at = [tuple(what(s["observation"])[1:3]) for s, _, _ in steps]
            begins = [at.index(tuple(seen(r)[0, 1:3])) for r in own]
            if isinstance(windows, int):
                ends = [begin + T + windows for begin in begins]
                assert all(x + windows >= y for x, y in zip(begins[1:], ends))
            else:
                expected_begins, ends = zip(*windows(steps, len(own)))
                assert begins == list(expected_begins)
            for rollout, begin, end in zip(own, begins, ends):
                check_rollout(rollout, steps[begin : end + 1])
            num_found += len(own)
            assert len(own) > 2
    assert num_found == len(found)
    done, last = (torch.cat([r[k][1:] for r in found]) for k in ("done", "terminated"))
    assert done.any() and last.any()


def one_after_the_other(burn_in, steps, num):
    return [(i * T, (i + 1) * T + burn_in) for i in range(num)]


def of_one_episode(steps, num):
    begin, result = 0, []
    while len(result) < num:
        ends = [step["episode_end"] for step, _, _ in steps[begin : begin + T + 1]]
        end = begin + (ends.index(True) if True in ends else T)
        result.append((begin, end))
        begin = end + 1 if True in ends else end
    return result


CASES = [
    ([], 0, functools.partial(one_after_the_other, 0)),
    ([], 3, functools.partial(one_after_the_other, 3)),
    pytest.param(
        *([], 2 * T, functools.partial(one_after_the_other, 2 * T)),
        marks=pytest.mark.slow,
    ),
    (["--one_episode_rollouts"], 0, of_one_episode),
]
cases = pytest.mark.parametrize(
    ("flags", "burn_in", "windows"),
    CASES,
    ids=["on-policy", "burn-in", "long burn-in", "one episode"],
)
SCRIPTS = [
    functools.partial(turn_envs.Two),
    functools.partial(turn_envs.Table, "info"),
]
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=["two", "three, masks"])


@pytest.mark.parametrize("masks", [None, "observation", "info"])
def test_each_step_of_each_agent_is_that_of_a_plain_loop(masks):
    env = make_env(masks=masks)
    agent = make_agent(env)
    steps, states = [env.initial(5)], [agent.initial_state(E * 3)]
    policy = play.Policy(agent, env)
    policy.act = agent.act
    for _ in range(150):
        steps.append(env.step(policy(steps[-1])))
        states.append(policy.core_state)
    assert env.num_acting == 1 and env.num_agents == 3
    assert all((~s["waits"]).any() for s in steps)
    for e in range(E):
        expected = played(turn_envs.Table(masks), agent, derive_seed(5, e), 150)
        for i, own in enumerate(expected.values()):
            row = 3 * e + i
            mine = [
                (map_structure(lambda x, r=row: x[r], step), state)
                for step, state in zip(steps, states)
                if not step["waits"][row]
            ]
            assert len(mine) > 15
            for (step, state), (theirs, _, before) in zip(mine, own):
                for name in theirs:
                    for (path, x), (_, y) in zip(
                        leaves(step[name], name), leaves(theirs[name])
                    ):
                        np.testing.assert_array_equal(x, y, path)
                for x, y in zip(state, before):
                    torch.testing.assert_close(x[:, row], y[:, 0])
    waiting = [s["reward"][s["waits"]] for s in steps]
    assert not np.concatenate(waiting).any()


@scripts
@cases
def test_an_actors_rollouts_have_the_turns_of_one_agent_each(
    script, flags, burn_in, windows
):
    env = environment.Environment([script() for _ in range(E)])
    agent = make_agent(env)
    agent.burn_in = burn_in
    flags = parse("--use_lstm", "--envs_per_actor", E, *flags)
    actor, buffers, arrays = make_actor(flags, env, 3, agent)
    free, found = list(range(len(buffers["reward"][0]))), []

    def take(n):
        return [free.pop(0) for _ in range(n)]

    for items in actor.rollouts(arrays, take, actors.SharedWeights(agent.net)):
        at = [index for index, _ in items]
        found.append(map_structure(lambda x, i=at: x[:, i].clone(), buffers))
        map_structure(lambda x, i=at: x.index_fill_(1, torch.tensor(i), 0), buffers)
        free += at
        if len(found) > 30:
            break
    check_rollouts(found, script, agent, 3, windows)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_where_acting_waits_for_updates_no_actor_waits_for_itself(burn_in):
    """Its rollouts fill at their own pace; those that are full wait for the others."""
    env = make_env(turn_envs.Two)
    agent = make_agent(env)
    agent.burn_in = burn_in
    flags = parse("--use_lstm", "--envs_per_actor", E, "--no-async", "--batch_size", 8)
    actor, buffers, arrays = make_actor(flags, env, 3, agent)
    assert buffers["done"].shape[1] == 8
    free, full, found = list(range(8)), [], []

    def take(n, least):
        assert least <= len(free)
        return [free.pop(0) for _ in range(min(n, len(free)))]

    for items in actor.rollouts(arrays, take, actors.SharedWeights(agent.net)):
        full += [index for index, _ in items]
        if len(full) == 8:
            found.append(map_structure(lambda x, i=full: x[:, i], buffers))
            free, full = full, []
        if len(found) > 8:
            break
    check_rollouts(found, functools.partial(turn_envs.Two), agent, 3, burn_in)


@contextlib.contextmanager
def streams(script, agent, num_streams=1, **options):
    """An ActorPool with streams from a real server, each of E environments of this
    script. Yields (its queue, the pool)."""
    queue = BatchingQueue(1, minimum_batch_size=1, maximum_batch_size=1,
                          maximum_queue_size=4)  # fmt: skip
    batcher = DynamicBatcher(1)
    address = f"127.0.0.1:{free_port()}"
    name, (masks,) = script.func.__name__, script.args or (None,)
    flags = ["--num_servers", 1, "--envs_per_server", E, "--address", address]
    flags += ["--env_args", f"masks={masks!r}"]
    with servers(*flags, env=ENVS + name):
        pool = ActorPool(T, queue, batcher, num_streams * [address],
                         agent.initial_state(1), seed=3, connect_timeout_s=30,
                         **options)  # fmt: skip
        weights = learner.PublishedWeights(agent.net, CPU)

        def infer():
            try:
                polybeast.inference(batcher, agent, weights, CPU)
            finally:  # Else who takes rollouts would wait for ever if it fails.
                queue.close(discard=True)

        threads = [threading.Thread(target=x) for x in (pool.run, infer)]
        for thread in threads:
            thread.start()
        try:
            yield queue, pool
        finally:
            pool.stop()
            batcher.close()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()


@scripts
@cases
def test_the_rollouts_of_streams_have_the_turns_of_one_agent_each(
    script, flags, burn_in, windows
):
    agent = make_agent(environment.Environment(script()))
    options = {"burn_in": burn_in, "one_episode": bool(flags)}
    with streams(script, agent, **options) as (queue, pool):
        found = [queue.dequeue_many() for _ in range(40)]
        [status] = pool.status()
    check_rollouts(found, script, agent, derive_seed(3, 0, 0, 0), windows)
    num_rows = E * len(script().possible_agents)
    least = sum(int(r.get("mask", r["done"] | True)[-T:].sum()) for r in found)
    assert least <= status["steps"] + num_rows and status["num_envs"] == num_rows


def test_where_acting_waits_for_updates_no_stream_waits_for_itself():
    script, B = functools.partial(turn_envs.Two), 8
    agent, found = make_agent(environment.Environment(script())), []
    with streams(script, agent, allowed_rollouts=B) as (queue, pool):
        for _ in range(8):
            found += [queue.dequeue_many() for _ in range(B)]
            assert pool.rollouts()["begun"] == len(found)
            pool.allow(B)
    check_rollouts(found, script, agent, derive_seed(3, 0, 0, 0), 0)


def test_where_acting_waits_for_updates_all_rows_of_a_stream_begin_rollouts():
    """Else agents that move first would begin what the others are to begin."""
    script, B = functools.partial(turn_envs.Steady), 2 * E
    agent = make_agent(environment.Environment(script()))
    options = dict(allowed_rollouts=B, num_streams=3)
    with streams(script, agent, **options) as (queue, pool):
        for _ in range(8):
            batch = [queue.dequeue_many() for _ in range(B)]
            agents = [int(r["observation"][0, 0, 3]) for r in batch]
            assert sorted(agents) == E * [0] + E * [1]
            pool.allow(B)


class LargeState:
    """An agent that remembers much, and of which nothing comes."""

    def __init__(self):
        self.net = torch.nn.Linear(1, 1)
        self.flags = types.SimpleNamespace(cuda_graphs=False)

    def initial_state(self, batch_size):
        return torch.zeros(1, batch_size, 30_000)

    def act(self, step, core_state):
        return {"action": step["last_action"]}, core_state + 1


def test_rows_by_turns_hold_no_recurrent_states_of_each_other():
    """Each would hold those of all rows at its last turns, however long ago."""
    script, before = functools.partial(turn_envs.Last), machine.rss_mb()
    with streams(script, LargeState(), burn_in=10) as (queue, _):
        for _ in range(40):
            queue.dequeue_many()
        grown = machine.rss_mb() - before
    assert grown < 130


def test_where_all_wait_core_states_stand_still():
    """No environment of ours makes such a step, but a server might."""
    env = make_env(turn_envs.Two)
    agent = make_agent(env)
    step = map_structure(lambda x: torch.as_tensor(x)[None], env.initial(0))
    step["waits"] |= True
    before = map_structure(lambda x: x + 1, agent.initial_state(env.num_envs))
    outputs, after = rollouts.act(agent.act, step, before)
    assert outputs["action"].shape == (1, env.num_envs)
    for x, y in zip(before, after):
        torch.testing.assert_close(x, y)


def test_a_test_game_has_the_return_of_a_plain_loop():
    env = environment.Environment([turn_envs.Table()])
    agent = make_agent(env)
    flags = types.SimpleNamespace(video=None, seed=2, num_test_episodes=20)
    policy = play.Policy(agent, env)
    policy.act = agent.act
    scores = [score for score, _ in play.episodes(flags, env, policy)]
    steps = played(turn_envs.Table(), agent, derive_seed(2, 0), 200)
    games = {}
    for step, _, _ in itertools.chain(*steps.values()):
        if step["episode_end"]:
            game = games.setdefault(int(step["observation"][1]), [])
            game.append(float(step["episode_return"]))
    expected = [np.mean(game) for _, game in sorted(games.items())]
    assert scores == pytest.approx(expected[:20])


def test_rewards_before_the_first_turn_are_on_the_score_and_lead_nowhere():
    class Second(turn_envs.Answer):
        def take_turn(self, agent, action):
            super().take_turn(agent, action)
            self.paid["bob"] += 7.0 * (self.turn == 1)

    env = environment.Environment([Second()])
    env.initial(0)
    step = env.step(np.zeros(2, np.int64))
    assert step["waits"].tolist() == [True, False] and step["done"][1]
    assert (step["reward"][1], step["episode_step"][1]) == (0, 0)
    assert step["episode_return"][1] == 7 and step["training_episode_return"][1] == 0


def test_what_waits_is_no_step_of_a_servers():
    env, statistics = make_env(), Statistics("x")
    steps = [env.initial(0)]
    for _ in range(40):
        steps.append(env.step(env.some_action()))
        statistics.add(steps[-1])
    acted = sum(int((~step["waits"]).sum()) for step in steps[1:])
    assert statistics.steps == acted < 40 * E * 2


def steps_of(cls):
    """Makes steps of an environment whose second copy has the fault."""
    others = turn_envs.Steady(masks=cls().masks)
    env = environment.Environment([others, cls()])
    env.initial(0)
    for _ in range(30):
        env.step(env.some_action())


@pytest.mark.parametrize("cls", turn_envs.FAULTS, ids=lambda c: c.__name__)
def test_a_fault_names_environment_and_agent(cls):
    with pytest.raises((BadStep, BadInput, KeyError, ValueError)) as e:
        steps_of(cls)
    [line] = "\n".join([*getattr(e.value, "__notes__", [str(e.value)])]).splitlines()
    assert re.search(cls.__doc__, line), line


def test_the_steps_that_faults_change_are_good():
    steps_of(turn_envs.Steady)


# The programs.


def small(module, savedir, *others, env, steps=800):
    return args(module, savedir, *others, env=ENVS + env, steps=steps)


@poly_first
def test_agents_by_turns_are_learned_from_and_tested(module, savedir):
    flags = small(module, savedir, "--env_args", "masks='observation'", env="env")
    succeeds(*flags, "--log_interval_steps", 40, module=module)
    assert read_logs(savedir / "x")[-1]["step"] == "800"
    video = savedir / "x.mp4"
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 3
    result = succeeds(*test, "--video", video, module=module)
    assert result.stdout.count("return ") == 4 and "mean age" in result.stdout
    assert video.stat().st_size > 0


@mono_first
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--agent", "ppo", "--num_minibatches", 1, "--batch_size", 4, "--use_lstm"],
        ["--agent", "r2d2", "--replay_start", 100, "--replay_size", 1000],
        ["--one_episode_rollouts"],
    ],
    ids=lambda flags: flags[1] if len(flags) > 1 else "one episode",
)
def test_each_way_to_learn_goes_with_turns(module, savedir, flags):
    flags = small(module, savedir, *flags, "--eval_interval_steps", 400, env="Two")
    succeeds(*flags, module=module)


@pytest.mark.survives("environment-hangs")
@pytest.mark.slow
@poly_first
def test_one_that_hangs_in_last_is_named_and_begins_anew(module, savedir, capfd):
    flags = small(module, savedir, "--env_timeout_seconds", 1, env="HangsInLast")
    result = succeeds(*flags, module=module)
    text = result.stderr + capfd.readouterr().err  # Also what the server says.
    assert re.search(turn_envs.HangsInLast.__doc__, text), text


CLASSIC = "pettingzoo.classic."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "game", "agent"),
    [
        ("monobeast", "tictactoe_v3", "ppo"),
        pytest.param("monobeast", "tictactoe_v3", "r2d2", marks=pytest.mark.long),
        ("polybeast", "connect_four_v3", "polybeast"),
    ],
)
def test_no_forbidden_move_is_made_in_pettingzoos_games(module, game, agent, savedir):
    """Environment raises at one, which is a death of an actor or stream."""
    pytest.importorskip(CLASSIC + game)
    others = {
        "ppo": ["--num_minibatches", 1],
        "r2d2": ["--replay_start", 400, "--replay_size", 4000],
    }.get(agent, [])
    flags = args(module, savedir, "--agent", agent, *others, "--use_lstm",
                 "--batch_size", 4, env=CLASSIC + game, steps=2000)  # fmt: skip
    result = succeeds(*flags, module=module)
    assert "died" not in result.stderr and "no stream" not in result.stderr
    logs = read_logs(savedir / "x")
    assert sum(float(row["episodes"]) for row in logs) > 0


@pytest.mark.long
@poly_first
def test_what_is_paid_while_others_act_is_learned_from(module, savedir):
    flags = small(module, savedir, "--entropy_cost", 0.001, env="Answer", steps=20_000)
    succeeds(*flags, "--learning_rate", 0.003, module=module)
    # Each agent has five turns, of which the last one of one of them is not paid.
    assert float(read_logs(savedir / "x")[-1]["episode_return"]) > 4
