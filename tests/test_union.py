"""Policies of unequal spaces."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests import parallel_envs, test_policies, turn_envs
from tests.programs import args, load, main, poly_first, read_logs, refusal, succeeds
from tests.test_agent import batches, make_actor
from tests.test_policies import alone, check_equal, rows_of
from torchbeast import environment, rollouts
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure

MIXED, UNLIKE = "red=red_*,blue=blue", "a=ann,b=bob"
# Names that a step's fields and methods of modules have, too.
ENVS = {"tests.parallel_envs:Mixed": "reward=red_*,train=blue",
        "tests.turn_envs:Unlike": "state=ann,outputs=bob"}  # fmt: skip


def make(*flags, cls=parallel_envs.Mixed, text=MIXED):
    """(flags, environment, agent)"""
    flags, env, agent = test_policies.make(*flags, cls=cls, text=text)
    agent.net.eval()
    return flags, env, agent


def test_spaces_are_the_union_of_the_policies_spaces():
    _, env, agent = make()
    script = parallel_envs.Mixed()
    assert env.action_space == spaces.Dict(
        {"red": script.action_space("red_0"), "blue": script.action_space("blue")}
    )
    assert env.observation_space["blue"] == script.observation_space("blue")
    assert set(env.observation_space["red"].spaces) == {"seen"}
    assert agent.agents["blue"].action_space == script.action_space("blue")
    assert agent.agents["red"].observation_space == env.observation_space["red"]


class Told(parallel_envs.Mixed):
    """The blue agent observes a text before what it sees."""

    def observation_space(self, agent):
        space = super().observation_space(agent)
        return spaces.Tuple([spaces.Text(9), space]) if agent == "blue" else space

    def observe(self):
        return {**super().observe(), "blue": ("a text", self.shown["blue"])}


def test_texts_of_one_policy_are_left_out():
    env = environment.Environment([Told()], policies=MIXED)
    step = env.initial(1)
    assert env.texts == ["observation/blue/0"]
    (seen,) = step["observation"]["blue"]
    np.testing.assert_array_equal(seen[1], env.env.envs[0].shown["blue"])
    assert not seen[[0, 2]].any()


def test_each_row_has_what_its_agent_sees_and_gives_what_it_chose():
    E = 2
    _, env, agent = make("--use_lstm")
    step, state = env.initial(3), agent.initial_state(env.num_envs)
    shown = [e.shown for e in env.env.envs]
    for _ in range(40):
        for row in range(3 * E):
            e, i = divmod(row, 3)
            name = parallel_envs.Mixed.possible_agents[i]
            out = env.env.out[row] and not (step["terminated"][row])
            seen, mask = step["observation"], step["action_mask"][row]
            for policy, x in (("red", seen["red"]["seen"]), ("blue", seen["blue"])):
                if out or policy != name.partition("_")[0]:
                    assert not x[row].any()
                else:
                    own = shown[e][name]
                    own = own["seen"] if policy == "red" else own
                    np.testing.assert_array_equal(x[row], own)
            if name == "blue" or out:
                assert mask.all()
            else:
                expected = shown[e][name]["action_mask"] > 0
                np.testing.assert_array_equal(mask, expected)
        tensors = map_structure(lambda x: torch.as_tensor(x)[None], step)
        outputs, state = agent.act(tensors, state)
        action = map_structure(lambda x: x[0].numpy(), outputs["action"])
        live = [list(e.agents) for e in env.env.envs]
        step = env.step(action)
        shown = [e.shown for e in env.env.envs]
        for e, script in enumerate(env.env.envs):
            for i, name in enumerate(script.possible_agents):
                if name not in live[e]:
                    continue
                given, row = script.given[name], 3 * e + i
                if name == "blue":
                    expected = action["blue"][row].clip(-2, 2)
                    np.testing.assert_allclose(given, expected)
                    last = step["last_action"]["blue"][row]
                    np.testing.assert_allclose(last, expected)
                    assert not action["red"][row]
                else:
                    assert given == action["red"][row]
                    assert not action["blue"][row].any()


@pytest.mark.parametrize(
    ("cls", "text"),
    [(parallel_envs.Mixed, MIXED), (turn_envs.Unlike, UNLIKE)],
)
def test_each_policy_acts_and_learns_as_it_would_alone(cls, text):
    flags, env, agent = make("--use_lstm", "--batch_size", 6, cls=cls, text=text)
    single = {}
    for name in agent.agents:
        own = type(env)([cls()], policies=flags.policies)
        own.observation_space = env.observation_space[name]
        own.action_space = env.action_space[name]
        single[name] = alone(agent, name, own)
    actor, buffers, arrays = make_actor(flags, env, 3, agent)
    if cls is turn_envs.Unlike:
        made = by_turns(actor, buffers, arrays, 3)
    else:
        made = [x for x, _ in zip(batches(actor, buffers, arrays), range(3))]
    for x in (agent, *single.values()):
        x.net.train()
        x.start_learning(torch.device("cpu"))
    learned = set()
    for batch in made:
        statistics = agent.learn(dict(batch))
        for number, (name, x) in enumerate(single.items()):
            rows = (batch["policy"][0] == number).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            learned.add(name)
            own = plain(batch, name, env)
            own = rows_of(own, rows)
            with torch.no_grad():  # What it did is what it would have done.
                logits = x.unroll(own, own["core_state"])[0]["policy_logits"][:-1]
            if batch is made[0]:
                moved = ~own["done"][1:]
                torch.testing.assert_close(
                    logits[moved], own["policy_logits"][moved], rtol=1e-4, atol=1e-5
                )
            expected = x.learn(own)
            check_equal(
                {k: torch.as_tensor(y) for k, y in expected.items()},
                {k: torch.as_tensor(statistics[f"{name}/{k}"]) for k in expected},
            )
            check_equal(agent.agents[name].net.state_dict(), x.net.state_dict())
    assert learned == set(single)


def plain(batch, name, env):
    """A batch as a policy alone would have it."""
    own = {k: x for k, x in batch.items() if k not in ("policy", "outputs")}
    for key in ("observation", "last_action", "action", "core_state"):
        own[key] = own[key][name]
    own |= batch["outputs"][name]
    mask, order, begin = own.pop("action_mask"), env.action_space.spaces, 0
    for policy, space in order.items():
        num = int(getattr(space, "n", 0))
        if policy == name and num:
            own["action_mask"] = mask[..., begin : begin + num]
        begin += num
    return own


def by_turns(actor, buffers, arrays, num):
    free, made = list(range(len(buffers["reward"][0]))), []

    def take(n, least=None):
        return [free.pop(0) for _ in range(n)]

    class Weights:
        def fetch(self, net, version):
            return 0

    for items in actor.rollouts(arrays, take, Weights()):
        indices = [index for index, _ in items]
        made.append(map_structure(lambda x, i=indices: x[:, i].clone(), buffers))
        free += indices
        if len(made) == num:
            return made


def test_a_policy_that_has_no_row_has_outputs_of_zeros():
    _, env, agent = make()
    step = map_structure(lambda x: torch.as_tensor(x)[None], env.initial(0))
    rows = (step["policy"][0] == 1).nonzero()[:, 0]
    step = rows_of(step, rows)
    outputs, _ = rollouts.act(agent.act, step, agent.initial_state(len(rows)))
    assert not outputs["action"]["red"].any() and outputs["action"]["blue"].any()
    assert not outputs["outputs"]["red"]["policy_logits"].any()


def test_agents_of_one_policy_need_equal_spaces():
    with pytest.raises(BadInput, match="agent 'blue' has the space Box.*, as 'red_0'"):
        environment.Environment([parallel_envs.Mixed()], policies="a=*")
    with pytest.raises(BadInput, match="agent 'red_1' has the space Dict.*, as 'blue'"):
        text = "a=red_0,b=blue,b=red_1"
        environment.Environment([parallel_envs.Mixed()], policies=text)


def test_what_a_mask_lacks_is_said_of_its_agent():
    class NoMask(parallel_envs.Mixed):
        def observe(self):
            shown = super().observe()
            if self.t == 2:
                del shown["red_1"]["action_mask"]
            return shown

    env = environment.Environment([NoMask()], policies=MIXED)
    env.initial(0)
    with pytest.raises(ValueError, match="agent 'red_1' of environment 0: .*action_m"):
        for _ in range(3):
            env.step(env.some_action())


# The programs.


@poly_first
@pytest.mark.parametrize("env", ENVS)
def test_policies_of_unequal_spaces_learn_resume_and_are_tested(module, savedir, env):
    run = args(module, savedir, "--policies", ENVS[env], "--eval_interval_steps", 200,
               "--num_test_episodes", 2, "--log_interval_steps", 40, env=env,
               steps=600)  # fmt: skip
    succeeds(*run, module=module)
    names = [pair.partition("=")[0] for pair in ENVS[env].split(",")]
    rows = read_logs(savedir / "x")
    for name in names:
        assert any(row[f"{name}/total_loss"] for row in rows)
        assert any(row[f"episode/{name}_return"] for row in rows)
    assert load(savedir)["agent"].keys() == set(names)
    result = main(*run, "--total_steps", 700, module=module)
    assert result.returncode == 0 and "resuming" in result.stderr, result.stderr
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 2
    succeeds(*test, module=module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent",
    [*(pytest.param(x, marks=pytest.mark.long) for x in ("ppo", "r2d2")), "pqn"],
)
def test_each_agent_has_policies_of_unequal_spaces(savedir, agent):
    others = {"r2d2": ["--replay_start", 100, "--replay_size", 1000]}
    flags = args("monobeast", savedir, "--policies", UNLIKE, "--agent", agent,
                 "--batch_size", 4, *others.get(agent, ["--num_minibatches", 1]),
                 "--use_lstm", "--eval_interval_steps", 400,
                 env="tests.turn_envs:Unlike", steps=1200)  # fmt: skip
    succeeds(*flags)


def test_unequal_spaces_without_policies_are_one_line(savedir):
    line = refusal(*args("monobeast", savedir, env="tests.parallel_envs:Mixed"))
    assert "they have one policy (--policies NAME=PATTERN,... makes several)" in line
