"""Which environments are made by their ids, and which are refused."""

import abc
import functools
import re
import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from tests import envs
from torchbeast import environment
from torchbeast.environment import Environment
from torchbeast.messages import BadInput
from torchbeast.vector import Vector


@pytest.mark.parametrize("action", [0, [0], [0, 0, 0], [[0], [0]]], ids=str)
def test_action_of_another_shape_is_refused(action):
    env = Environment([envs.Counter(), envs.Counter()])
    env.initial()
    with pytest.raises(ValueError) as error:
        env.step(np.array(action))
    shape = list(np.shape(action))
    assert str(error.value) == f"action is int64 {shape}, expected int64 [2]"


@pytest.mark.parametrize(
    "env, words",
    [([], "no environment"), ([SyncVectorEnv([envs.Catch])], "not in a list")],
)
def test_list_of_anything_but_single_environments_is_refused(env, words):
    with pytest.raises(BadInput, match=words):
        Environment(env)


def test_step_before_initial_is_refused():
    with pytest.raises(RuntimeError, match="before Environment.initial"):
        Environment(envs.Counter()).step([0])


@pytest.mark.parametrize("missing", ["reset", "step", "action_space"])
def test_object_that_is_no_environment_is_refused(missing):
    class Thing:
        pass

    for name in {"reset", "step", "observation_space", "action_space"} - {missing}:
        setattr(Thing, name, None)
    with pytest.raises(ValueError, match=f"Thing is neither .* no {missing}"):
        Environment(Thing())
    with pytest.raises(ValueError, match=f"Thing is neither .* no {missing}"):
        Environment([envs.Counter(), Thing()])


@pytest.mark.parametrize(
    "env_id, close",
    [
        ("CartPole-v7", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CratPole-v1", "CartPole-v1"),
        ("torchbeast/Cach-v0", "torchbeast/Catch-v0"),
        ("nobody/CartPole-v1", "CartPole-v1"),
        ("tests.envs:Catch-v0", " tests.envs:torchbeast/Catch-v0,"),
        ("tests.envs:Mack-v0", " tests.envs:torchbeast/Mock-v0"),
        ("json:CartPol-v1", " json:CartPole-v1"),
    ],
)
def test_unknown_id_comes_with_close_ones(env_id, close):
    with pytest.raises(ValueError, match="did you mean") as error:
        environment.make(env_id)
    message = str(error.value)
    assert repr(env_id) in message
    assert close in message.split("did you mean")[1]
    assert "\n" not in message


@pytest.mark.parametrize("name", ["my_zoo", "my_zoo:Field", "my_zoo:FeildEnv"])
def test_names_in_a_module_that_end_as_environments_are_close_ones(name, monkeypatch):
    field = type("FieldEnv", (), dict(__module__="my_zoo"))
    module = types.ModuleType("my_zoo")
    module.FieldEnv = field
    monkeypatch.setitem(sys.modules, "my_zoo", module)
    text = "did you mean my_zoo:FieldEnv?"
    if ":" not in name:
        text = "my_zoo has my_zoo:FieldEnv"
    with pytest.raises(ValueError) as error:
        environment.make(name)
    assert str(error.value).endswith(f": {text}")


def test_a_class_that_cannot_be_made_is_no_close_one(monkeypatch):
    methods = {"step": abc.abstractmethod(lambda self: None)}
    module = types.ModuleType("my_zoo")
    module.FieldEnv = abc.ABCMeta("FieldEnv", (), {**methods, "__module__": "my_zoo"})
    monkeypatch.setitem(sys.modules, "my_zoo", module)
    with pytest.raises(ValueError, match="my_zoo registers none like it"):
        environment.make("my_zoo:FieldEvn")


def test_a_module_named_alone_says_what_it_has():
    with pytest.raises(ValueError, match="faulty_envs has tests.faulty_envs:") as error:
        environment.make("tests.faulty_envs")
    assert str(error.value).endswith(", ...")


def test_a_module_that_registers_no_environment_says_so():
    with pytest.raises(ValueError, match="'json': json registers none like it"):
        environment.make("json")


def test_unknown_id_that_is_close_to_none_comes_without():
    with pytest.raises(ValueError) as error:
        environment.make("0123456789")
    elsewhere = "(if another package has it: MODULE:0123456789)"
    assert str(error.value) == f"unknown environment '0123456789' {elsewhere}"


def test_ids_of_a_module_are_also_those_that_a_function_of_its_makes(monkeypatch):
    make = functools.partial(envs.Counter)
    spec = gymnasium.envs.registration.EnvSpec("far/Walker-v0", entry_point=make)
    monkeypatch.setitem(gymnasium.registry, "far/Walker-v0", spec)
    with pytest.raises(ValueError, match="did you mean tests.envs:far/Walker-v0"):
        environment.make("tests.envs:far/Walk")


def raises(error):
    raise error


@pytest.mark.parametrize(
    "error",
    [
        gymnasium.error.DependencyNotInstalled("needs\n  a thing"),
        ImportError("needs\n  a thing"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_environment_that_cannot_be_made_says_why_in_one_line(monkeypatch, error):
    spec = gymnasium.envs.registration.EnvSpec(
        "Broken-v0", entry_point=lambda **kwargs: raises(error)
    )
    monkeypatch.setitem(gymnasium.registry, "Broken-v0", spec)
    with pytest.raises(ValueError) as raised:
        environment.make("Broken-v0")
    message = "environment 'Broken-v0' cannot be made: "
    assert str(raised.value).startswith(message)
    assert "needs a thing" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "env_id, argument, reason",
    [
        ("FrozenLake-v1", "map_name=foo", "map_name='foo': KeyError: 'foo' "),
        ("Acrobot-v1", "render_mode=7", "render_mode=7: AttributeError: 'int' "),
    ],
)
def test_a_value_that_a_constructor_does_not_bear_is_named(env_id, argument, reason):
    flags = types.SimpleNamespace(env=env_id, env_args=[environment.argument(argument)])

    def create_env(flags, num_envs, *_):
        return Environment(environment.make(env_id, num_envs, **dict(flags.env_args)))

    with pytest.raises(BadInput) as raised:
        environment.probe(create_env, flags, 1)
    expected = f"environment {env_id!r} cannot be made with {reason}"
    assert str(raised.value).startswith(expected)
    assert re.search(r"\(/\S+\.py:\d+\)$", str(raised.value))  # Where.


def test_an_argument_that_gymnasium_has_itself_is_explained(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Id-v0", entry_point=lambda id: None)
    monkeypatch.setitem(gymnasium.registry, "Id-v0", spec)
    with pytest.raises(BadInput, match="has an argument 'id' of its own: register a"):
        environment.make("Id-v0", 1, id="x")


def test_module_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no_such_module"):
        environment.make("no_such_module:Some-v0")


def test_environment_is_made_with_a_render_mode_only_if_asked_to():
    # Counter has no argument render_mode.
    first, second = environment.make("torchbeast/Counter-v0", 2)
    assert first.render_mode is None and first is not second
    np.testing.assert_array_equal(first.reset()[0], [0, 0, 0])
    [env] = environment.make("CartPole-v1", 1, "rgb_array")
    assert env.render_mode == "rgb_array"


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_vector_environment_that_an_id_has_of_its_own_is_used():
    env = Environment(environment.make("CartPole-v0", 3))
    assert isinstance(env.env, Vector) and env.num_envs == 3
    assert env.env.env.unwrapped.max_episode_steps == 200  # As registered.


def test_a_registered_environment_of_pettingzoo_is_named(monkeypatch):
    class Pistonball:
        pass

    Pistonball.__module__ = "pettingzoo.butterfly"
    spec = gymnasium.envs.registration.EnvSpec("Piston-v0", entry_point=Pistonball)
    monkeypatch.setitem(gymnasium.registry, "Piston-v0", spec)
    with pytest.raises(BadInput, match="'Piston-v0' cannot be made: it is Pett"):
        environment.make("Piston-v0")


class Game(envs.Counter):
    """Its process may have one."""

    open = []

    def __init__(self, task, error="multiple emulator instances per process"):
        super().__init__()
        if Game.open:
            raise RuntimeError(error)
        Game.open.append(task)

    def close(self):
        Game.open.clear()


@pytest.fixture
def game(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Game-v0", entry_point=Game)
    monkeypatch.setitem(gymnasium.registry, "Game-v0", spec)
    return "Game-v0"


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            {},
            "missing 1 required .* 'task': .*--env_args NAME=VALUE$",
        ),
        ({"map": 1}, "keyword argument 'map': expected one of task, error$"),
    ],
)
def test_arguments_that_a_constructor_does_not_take_are_one_line(game, kwargs, words):
    with pytest.raises(BadInput, match=words) as error:
        environment.make(game, 2, **kwargs)
    assert "\n" not in str(error.value)


def test_a_class_that_takes_no_arguments_is_not_to_be_given_some(monkeypatch):
    bare = type("Bare", (gymnasium.Env,), {})
    spec = gymnasium.envs.registration.EnvSpec("Bare-v0", entry_point=bare)
    monkeypatch.setitem(gymnasium.registry, "Bare-v0", spec)
    with pytest.raises(BadInput, match="made: Bare.. takes no arguments$"):
        environment.make("Bare-v0", size=1)


def test_a_simulator_of_one_instance_a_process_gets_the_remedy(game):
    with pytest.raises(BadInput, match="--envs_per_actor 1 .* --envs_per_server 1"):
        environment.make(game, 2, task=1)
    assert not Game.open  # What was made is closed.
    [env] = environment.make(game, 1, task=1)
    env.close()


def test_another_error_of_the_second_environment_is_its_own(game):
    with pytest.raises(RuntimeError, match="no licence"):
        environment.make(game, 2, task=1, error="no licence")
    assert not Game.open
