"""Several policies in one environment: --policies. (Those of environments on the device
are in test_warpbeast.py, too.)"""

import re
import shlex

import pytest
import torch

import polybeast
from tests import envs, parallel_envs, turn_envs
from tests.programs import args, load, poly_first, read_logs, refusal, succeeds
from tests.test_agent import T, batches, make_actor, parse
from torchbeast import environment, policies, rollouts
from torchbeast.flags import load_agent
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure

CROWD, TABLE = "tests.parallel_envs:", "tests.turn_envs:"
PAIRS = "odd=ann,even=b*,odd=c*,even=dan"


def make(*flags, cls=parallel_envs.Crowd, text=PAIRS, E=2, agent="polybeast"):
    """(flags, environment, agent) of several policies."""
    flags = parse("--policies", text, "--envs_per_actor", E, *flags, agent=agent)
    env = environment.Environment([cls() for _ in range(E)], policies=flags.policies)
    torch.manual_seed(0)
    return flags, env, policies.make_agent(flags, env)


def alone(agent, name, env):
    """The agent of one policy, made as if there were no others."""
    flags = agent.agents[name].flags
    make = load_agent(flags.agent).Agent
    other = make(flags, env.observation_space, env.action_space)
    other.net.load_state_dict(agent.agents[name].net.state_dict())
    return other


def rows_of(nest, rows):
    return map_structure(lambda x: x[:, rows], nest)


def check_equal(nest, other):
    for (path, x), (_, y) in zip(leaves(nest), leaves(other)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=path)


# Which policy is whose.


def test_patterns_say_whose_policy_acts():
    _, env, agent = make()
    assert env.policies == {"odd": [0, 2], "even": [1, 3]}
    assert env.initial(0)["policy"].tolist() == 2 * [0, 1, 0, 1]
    assert policies.policy_sizes(env) == {"odd": 2, "even": 2}
    assert list(agent.agents) == ["odd", "even"]


def test_without_policies_there_is_no_such_field():
    for pairs in (None, "all=*"):
        env = environment.Environment([parallel_envs.Crowd()], policies=pairs)
        assert env.policies == {} and "policy" not in env.initial(0)
        assert isinstance(policies.make_agent(parse(), env), polybeast.Agent)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=ann", "agent 'bob' of crowd_v0 matches nothing, expected exactly one"),
        ("a=*,b=b*", r"agent 'bob' of crowd_v0 matches a=\* and b=b\*, expected"),
        ("a=*,b=zoe", "b=zoe matches no agent of crowd_v0, which has .'ann'"),
    ],
)
def test_each_agent_has_exactly_one_policy(text, message):
    with pytest.raises(BadInput, match=f"--policies: {message}"):
        environment.Environment([parallel_envs.Crowd()], policies=text)


def test_an_environment_without_agents_has_no_policies():
    with pytest.raises(BadInput, match="--policies: .* is no environment of Petting"):
        environment.Environment([envs.Counter()], policies="a=*")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "red"], "'red', expected NAME=PATTERN,..."),
        (["--policies", "a.b=*"], "'a.b=.*', expected NAME=PATTERN,..."),
        (["--even.alpha", 1], "crowd_v0 has one policy, whose flags are"),
        (["--policies", PAIRS, "--freeze", "x"], "crowd_v0 has no policy 'x', it has"),
        (["--policies", PAIRS, "--even.env", "x"], "policy even: --env: expected a f"),
        (["--policies", PAIRS, "--even.use_lstm", "--agent", "r2d2", "--even.burn_in",
          9], "the same --burn_in and --use_lstm of all"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line(savedir, flags, message):
    line = refusal(*args("monobeast", savedir, *flags, env=CROWD + "Crowd"))
    assert re.search(message, line)


def test_a_learner_and_servers_with_other_policies_do_not_fit():
    _, env, _ = make()
    _, other, _ = make(text="odd=ann,even=b*,even=c*,odd=dan")
    plain = environment.Environment([parallel_envs.Crowd()])
    assert len({env.signature(), other.signature(), plain.signature()}) == 3
    assert plain.signature() == str(plain.observation_space)


# Acting and learning.


@pytest.mark.parametrize("cls", [parallel_envs.Crowd, turn_envs.Table])
def test_each_policy_acts_on_its_rows_as_it_would_alone(cls):
    text = PAIRS if cls is parallel_envs.Crowd else "odd=ann,odd=cem,even=bob"
    _, env, agent = make("--use_lstm", cls=cls, text=text)
    single = {name: alone(agent, name, env) for name in agent.agents}
    agent.net.eval()
    steps, state = [env.initial(1)], agent.initial_state(env.num_envs)
    states = {}
    for name, x in single.items():
        x.net.eval()
        states[name] = x.initial_state(env.num_envs)
    seen = set()
    for _ in range(60):
        step = map_structure(lambda x: torch.as_tensor(x)[None], steps[-1])
        outputs, state = rollouts.act(
            lambda *x: agent.act(*x, greedy=True), step, state
        )
        for number, (name, x) in enumerate(single.items()):
            own = step["policy"][0] == number
            if "waits" in step:
                own &= ~step["waits"][0]
            rows = own.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            seen.add(name)
            found, after = x.act(*rows_of((step, states[name]), rows), greedy=True)
            map_structure(lambda x, y, r=rows: y.index_copy_(1, r, x), after,
                          states[name])  # fmt: skip
            check_equal(rows_of(outputs, rows), found)
            check_equal(rows_of(state[name], rows), after)
        steps.append(env.step(outputs["action"][0].numpy()))
    assert seen == {"odd", "even"}


def test_numbers_that_a_server_makes_up_do_no_harm():
    _, env, agent = make()
    step = map_structure(lambda x: torch.as_tensor(x)[None], env.initial(1))
    step["policy"][:] = 200
    outputs, _ = agent.act(step, agent.initial_state(env.num_envs))
    assert outputs["action"].shape == (1, env.num_envs)


def first_batches(*flags, num=3, **kwargs):
    """(environment, agent, batches): what an actor with several policies fills."""
    flags, env, agent = make(*flags, **kwargs)
    agent.net.eval()
    actor, buffers, arrays = make_actor(flags, env, 3, agent)
    made = [x for x, _ in zip(batches(actor, buffers, arrays), range(num))]
    agent.net.train()
    return env, agent, made


@pytest.mark.parametrize("flags", [[], ["--use_lstm"]])
def test_each_policy_learns_from_its_rows_as_it_would_alone(flags):
    flags = ["--even.learning_rate", 0.02, "--batch_size", 8, *flags]
    env, agent, made = first_batches(*flags)
    single = {name: alone(agent, name, env) for name in agent.agents}
    for x in (agent, *single.values()):
        x.start_learning(torch.device("cpu"))
    assert single["even"].flags.learning_rate == 0.02
    for batch in made:
        statistics, expected = agent.learn(dict(batch)), {}
        for number, (name, x) in enumerate(single.items()):
            rows = (batch["policy"][0] == number).nonzero()[:, 0]
            own = {k: y for k, y in batch.items() if k != "policy"}
            own["core_state"] = own["core_state"][name]
            own = x.learn(rows_of(own, rows))
            expected.update({f"{name}/{k}": y for k, y in own.items()})
        assert list(statistics) == list(expected)
        check_equal(map_structure(torch.as_tensor, statistics),
                    map_structure(torch.as_tensor, expected))  # fmt: skip
        for name, x in single.items():
            check_equal(agent.agents[name].net.state_dict(), x.net.state_dict())


def test_what_others_do_in_a_rollout_changes_nothing():
    _, agent, [batch] = first_batches("--use_lstm", num=1, E=3)
    batch["policy"][:] = 0
    begins = batch["done"].cumsum(0) % 2 == 0
    batch["policy"][begins] = 1  # Every second episode of a row.
    found = agent.split(batch)
    assert found.keys() == {"odd", "even"}
    changed = map_structure(torch.clone, batch)
    changed["reward"][begins] = 1000
    changed["observation"][begins] += 100
    changed["terminated"][begins] = True
    changed["action"][begins[:-1]] = 0
    results = []
    for x in (batch, changed):
        own, one = agent.split(x)["odd"], agent.agents["odd"]
        outputs, _ = one.unroll(own, own["core_state"])
        loss, statistics = one.loss(own, outputs)
        results.append(statistics["baseline_loss"])
        one.net.zero_grad()
        loss.backward()
        results.append([p.grad.clone() for p in one.net.parameters()])
    assert results[0] > 0
    check_equal(results[:2], results[2:])


def test_a_policy_without_a_rollout_learns_nothing_and_counts_its_steps():
    _, agent, [batch] = first_batches(num=1)
    agent.start_learning(torch.device("cpu"))
    before = map_structure(torch.clone, agent.agents["even"].net.state_dict())
    statistics = agent.learn(rows_of(batch, batch["policy"][0] == 0))
    assert {name.split("/")[0] for name in statistics} == {"odd"}
    check_equal(agent.agents["even"].net.state_dict(), before)
    assert agent.agents["even"].step == agent.agents["odd"].step > 0


def test_it_explores_less_all_the_same_unless_it_is_frozen():
    steps = 100 * T
    args = "--batch_size", 4, "--exploration_steps", steps, "--freeze", "odd"
    _, agent, [batch] = first_batches(*args, num=1, agent="r2d2")
    agent.start_learning(torch.device("cpu"))
    even, odd = (agent.agents[name] for name in ("even", "odd"))
    agent.learn(rows_of(batch, batch["policy"][0] == 1))
    assert even.net.exploration == pytest.approx(1 - even.step / steps)
    assert even.step > 0 and odd.net.exploration == 1


def test_a_frozen_policys_schedules_go_on():
    _, agent, [batch] = first_batches("--freeze", "even", num=1)
    agent.start_learning(torch.device("cpu"))
    agent.learn(batch)
    assert agent.agents["even"].step == agent.agents["odd"].step > 0


@pytest.mark.parametrize("B", [1, 2, 6, 7])
def test_schedules_end_with_the_run_though_rollouts_of_a_policy_are_rounded(B):
    steps = 100 * T * B
    text = "one=ann,others=[bcd]*"
    flags, _, agent = make("--batch_size", B, "--total_steps", steps, text=text)
    for policy in agent.agents.values():
        for _ in range(99):
            policy.step += T * policy.flags.batch_size
        assert policy.fraction_left() == pytest.approx(0.01)


def test_returns_are_counted_for_each_policy():
    _, agent, made = first_batches(num=8)
    for batch in made:
        found = agent.ended_episodes(batch, T)
        end, total = batch["episode_end"][1:], batch["episode_return"][1:]
        for number, name in enumerate(agent.agents):
            own = end & (batch["policy"][1:] == number)
            expected = [total[own].sum(), own.sum()]
            assert found[f"episode/{name}_return"].tolist() == expected
        everything = rollouts.ended_episodes(batch, T)
        for name, x in everything.items():
            assert torch.equal(found[name], x), name


# The programs.


@poly_first
@pytest.mark.parametrize("env", [CROWD + "Targets", TABLE + "Answer"])
def test_policies_learn_resume_and_are_tested(module, savedir, env):
    names = {"Targets": "a=x,b=[yz]", "Answer": "a=ann,b=bob"}[env.partition(":")[2]]
    flags = "--policies", names, "--a.learning_rate", 0.002, "--freeze", "b"
    flags += "--log_interval_steps", 40
    run = args(module, savedir, *flags, env=env, steps=600)
    succeeds(*run, module=module)
    first = load(savedir)["agent"]
    rows = read_logs(savedir / "x")
    assert any(row["a/total_loss"] for row in rows)
    assert not any(name.startswith("b/") for name in rows[0])
    assert any(row["episode/b_return"] for row in rows)
    result = succeeds(*run, "--total_steps", 1200, module=module)
    assert "resuming" in result.stderr
    then = load(savedir)["agent"]

    def moved(name):
        pairs = zip(first[name]["model"].values(), then[name]["model"].values())
        return any(not torch.equal(x, y) for x, y in pairs)

    assert moved("a") and not moved("b")
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 2
    result = succeeds(*test, "--video", savedir / "x.mp4", module=module)
    assert result.stdout.count("episode ") == 2
    assert f"--policies {shlex.quote(names)}" in result.stdout
    assert "--a.learning_rate 0.002" in result.stdout
    assert "mean a_return" in result.stdout and "mean b_return" in result.stdout
    assert (savedir / "x.mp4").stat().st_size > 0


@pytest.mark.slow
def test_both_policies_learn_what_is_right(savedir):
    flags = args("monobeast", savedir, "--policies", "a=x,b=[yz]", "--learning_rate",
                 0.003, "--log_interval_steps", 1000, env=CROWD + "Targets",
                 steps=10_000)  # fmt: skip
    succeeds(*flags)
    last = read_logs(savedir / "x")[-1]
    assert min(float(last[f"episode/{name}_return"]) for name in "ab") > 5
