"""Environments that behave as other people's do: they exit, start processes, change
directory, configure logging, return odd things. test_hostile_envs.py gives each of them
to both programs.

An environment's docstring is what the program says before it ends, a regular
expression; without one, it trains.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging.config
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from tests.faulty_envs import Base, Raises

ENVIRONMENTS = []


def hostile(cls):
    gymnasium.register(f"{cls.__name__}-v0", entry_point=cls)
    ENVIRONMENTS.append(cls)
    return cls


def hostile_vector(cls):
    gymnasium.register(f"{cls.__name__}-v0", entry_point=Base, vector_entry_point=cls)
    ENVIRONMENTS.append(cls)
    return cls


# Masks of actions.


@hostile
class AllowsNoAction(Base):
    """environment AllowsNoAction-v0: info/action_mask of environment 0 allows no"""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": np.zeros(self.action_space.n, np.int8)}


@hostile
class MaskOfAnotherSize(Base):
    """environment MaskOfAnotherSize-v0: info/action_mask is int8 .7., expected"""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": np.ones(7, np.int8)}


@hostile
class ForgetsItsMask(Base):
    """environment ForgetsItsMask-v0: info/action_mask is not in the info, a dict"""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": np.ones(self.action_space.n, np.int8)}


# What is no Exception, and what ends processes.


class SometimesRaises(Base):
    error = None

    def reward(self):
        if self.num_steps == 150:
            raise self.error
        return 1.0


@hostile
class Exits(SometimesRaises):
    error = SystemExit(0)


@hostile
class Cancelled(SometimesRaises):
    error = asyncio.CancelledError()


@hostile
class Interrupts(SometimesRaises):
    error = KeyboardInterrupt()


@hostile
class ExitsInConstructor(Base):
    """ExitsInConstructor-v0 raised SystemExit"""

    def __init__(self):
        raise SystemExit(0)


@hostile
class RaisesInReset(Base):
    r"""reset\(\) of RaisesInReset-v0 raised RuntimeError: no licence"""

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no licence")


@hostile
class AlwaysRaises(Base):
    """(died after 3 restarts without a rollout|no rollout was delivered)"""

    def reward(self):
        if self.num_steps == 3:
            raise RuntimeError("the ball went through the floor")
        return 1.0


@hostile
class KillsItsProcess(Base):
    """(died after 3 restarts without a rollout|ended after 2 restarts without)"""

    def reward(self):
        if self.num_steps == 3:
            os._exit(3)
        return 1.0


@hostile
class RaisesInClose(Base):
    def close(self):
        raise RuntimeError("it is closed already")


@hostile
class InterruptsInClose(Raises):
    def close(self):
        if self.num_steps > 100:
            raise KeyboardInterrupt


@hostile
class OutOfBounds(Base):
    """observation is .* expected 0 to 2"""

    observation_space = spaces.Discrete(3)

    def observation(self):
        return 3


# Processes, directories, logs.


@hostile
class StartsAProcess(Base):
    def __init__(self):
        self.simulator = subprocess.Popen(["sleep", "1000.25"])


@hostile
class EndsItsProcess(StartsAProcess):
    def close(self):
        self.simulator.terminate()
        self.simulator.wait()


@hostile
class Forks(Base):  # A fork keeps open what its parent has open.
    def __init__(self):
        context = multiprocessing.get_context("fork")
        context.Process(target=time.sleep, args=(1000,), daemon=True).start()


@hostile
class ForksInC(Base):
    # Its simulator's library forks while other threads run, which may do so, too.
    def __init__(self):
        for _ in range(100):
            if (pid := ctypes.CDLL(None).fork()) == 0:
                os._exit(0)
            os.kill(pid, signal.SIGKILL)  # It may wait for the GIL for ever.
            os.waitpid(pid, 0)


class SlowStart(StartsAProcess):
    """Takes its time when it has started its simulator. Not run to an end."""

    def __init__(self):
        super().__init__()
        time.sleep(1000)


gymnasium.register("SlowStart-v0", SlowStart)


class HasASimulator(Base):
    """A process that a terminal's Ctrl-C ends, and a file in /dev/shm whose name begins
    with `name` and which only close() removes. Not run to an end.

    seconds: what the constructor takes.
    """

    def __init__(self, name, seconds=0.0):
        self.simulator = subprocess.Popen(["cat"], stdin=-1, stdout=-1)
        self.ask()
        # Last: whoever sees the file may end the simulator, and no constructor fails.
        file, self.path = tempfile.mkstemp(prefix=name, dir="/dev/shm")
        os.close(file)
        time.sleep(seconds)

    def ask(self):
        try:
            self.simulator.stdin.write(b"\n")
            self.simulator.stdin.flush()
            answered = self.simulator.stdout.read(1)
        except BrokenPipeError:
            answered = False
        if not answered:
            raise RuntimeError("the simulator has ended")

    def step(self, action):
        time.sleep(0.002)
        self.ask()
        return super().step(action)

    def close(self):
        os.unlink(self.path)
        self.simulator.kill()
        self.simulator.communicate()


gymnasium.register("HasASimulator-v0", HasASimulator)


@hostile
class LeavesAThread(Base):
    def __init__(self):
        threading.Thread(target=threading.Event().wait).start()


@hostile
class LeavesATimer(Base):
    def __init__(self):
        with contextlib.suppress(ValueError):  # In a server's thread.
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)


@hostile
class SetsDefaults(Base):
    def __init__(self):
        np.seterr(all="raise")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)

    def reward(self):
        return 1e-60  # 0 in float32.


@hostile
class ClosesFiles(Base):
    def __init__(self):
        for fd in (1, 2):
            with contextlib.suppress(OSError):
                os.close(fd)


@hostile
class ClosesStreams(Base):
    def reward(self):
        if self.num_steps == 50:
            for file in (sys.stdout, sys.stderr):
                file.close()
        return 1.0


@hostile
class RestartsAChild(Base):
    child = None

    def reset(self, *, seed=None, options=None):
        if self.num_steps % 100 == 0:
            self.close()
            context = multiprocessing.get_context("fork")
            self.child = context.Process(target=time.sleep, args=(1000,), daemon=True)
            self.child.start()
        return super().reset(seed=seed)

    def close(self):
        if self.child is not None:
            self.child.terminate()
            self.child.join()


@hostile
class TakesNoSeed(Base):
    r"""environment TakesNoSeed-v0: .*expected reset.self, ., seed=None, options=None"""

    def reset(self):
        return super().reset()


@hostile
class LosesItsReward(Base):
    """environment LosesItsReward-v0: reward is 'None', expected one number"""

    def reward(self):
        return None if self.num_steps >= 5 else 1.0


@hostile
class HasTwoRewards(Base):
    """reward is .*, expected one number"""

    def reward(self):
        return np.zeros(2)


@hostile
class ChangesDirectory(Base):
    def __init__(self):
        self.directory = tempfile.mkdtemp()
        os.chdir(self.directory)

    def close(self):
        os.rmdir(self.directory)


@hostile
class ConfiguresLogging(Base):
    def __init__(self):
        logging.config.dictConfig({"version": 1})
        logging.disable(logging.CRITICAL)


# What steps return.


@hostile
class OddInfo(Base):
    def step(self, action):
        *result, _ = super().step(action)
        odd = [None, {}, {"x": None}, {"x": np.zeros(self.t)}, {"x": "text"}]
        return *result, {**(odd[self.t % 5] or {}), "episode_metrics": odd}


@hostile
class NoInfo(Base):
    def step(self, action):
        return *super().step(action)[:-1], None


@hostile
class TensorObservations(Base):
    def observation(self):
        return torch.full((3,), self.t / 10)


@hostile
class NegativeStrides(Base):
    def observation(self):
        return super().observation()[::-1]


@hostile
class OtherByteOrder(Base):
    observation_space = spaces.Box(0, 1, (3,), np.dtype(">f4"))

    def observation(self):
        return super().observation().astype(">f4")


@hostile
class RewardArrays(Base):
    def reward(self):
        return np.array([1.0])


@hostile
class BadRewards(Base):
    """(died after 3 restarts|no rollout was delivered).*"""

    def reward(self):
        return "a lot" if self.num_steps > 1 else 1.0  # Not when it is tried.


class VectorBase(VectorEnv):
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = Base.observation_space
    single_action_space = Base.action_space

    def __init__(self, num_envs=1):
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation(), {}

    def step(self, actions):
        self.t = (self.t + 1) % 11
        ends = [self.t == 10] * self.num_envs
        zeros = [False] * self.num_envs
        return self.observation(), [1.0] * self.num_envs, ends, zeros, {}

    def observation(self):
        return np.full((self.num_envs, 3), self.t / 10, np.float32)


@hostile_vector
class Lists(VectorBase):
    pass


@hostile_vector
class VectorTensors(VectorBase):
    def observation(self):
        return torch.full((self.num_envs, 3), self.t / 10)


@hostile_vector
class VectorOfOtherByteOrder(VectorBase):
    def observation(self):
        return super().observation().astype(">f4")[:, ::-1]


# What spaces there are.


@hostile
class FirstObservationUnlikeItsSpace(Base):
    r"""observation is float32 \[4\], expected float32 \[3\]"""

    def observation(self):
        return np.zeros(4, np.float32)


@hostile
class EntryMissing(Base):
    """observation/speed is not in the observation, a dict"""

    observation_space = spaces.Dict(position=spaces.Discrete(2), speed=spaces.Box(0, 1))

    def observation(self):
        return {"position": 1}


@hostile
class NoSpaces(Base):
    """NoSpaces-v0 has no observation_space"""

    observation_space = None


@hostile
class ManyChoices(Base):
    """has 1,099,511,627,776 choices, expected at most 65,536"""

    observation_space = spaces.Discrete(2**40)


@hostile
class EmptyDict(Base):
    """has no entry that a network can read"""

    observation_space = spaces.Dict()


@hostile
class NoChannels(Base):
    r"""observation has shape \(20, 20, 0\)"""

    observation_space = spaces.Box(0, 255, (20, 20, 0), np.uint8)


@hostile
class Deep(Base):
    """nested deeper than 16 levels"""

    observation_space = spaces.Discrete(2)
    for _ in range(40):
        observation_space = spaces.Dict(x=observation_space)


@hostile
class Huge(Base):
    """the network for Huge-v0 is larger than the memory"""

    @functools.cached_property
    def observation_space(self):
        return spaces.Box(0, 255, (250_000_000,), np.uint8)

    def observation(self):
        return np.zeros(250_000_000, np.uint8)


@hostile
class OnlyText(Base):
    """observation space Text.* is not supported"""

    observation_space = spaces.Text(5)


@hostile
class SomeText(Base):
    observation_space = spaces.Dict(mission=spaces.Text(9), position=spaces.Discrete(2))

    def observation(self):
        return {"mission": "go", "position": 1}


@hostile
class RaisesInRender(Base):
    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        raise NotImplementedError("no renderer")


@hostile
class NoFrames(Base):
    metadata = {"render_fps": None, "render_modes": None}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return None


# When vector environments reset.


@hostile_vector
class UnknownAutoreset(VectorBase):
    """autoreset mode sometimes"""

    metadata = {"autoreset_mode": "sometimes"}


@hostile_vector
class NoAutoreset(VectorBase):
    """states no autoreset mode"""

    metadata = {}


class ResetsWithinTheStep(VectorBase):
    def step(self, actions):
        observation, rewards, ends, zeros, info = super().step(actions)
        if ends[0]:
            info = {"final_obs": observation}
            observation, _ = self.reset()
        return observation, rewards, ends, zeros, info


@hostile_vector
class SameStep(ResetsWithinTheStep):
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}


@hostile_vector
class Lies(ResetsWithinTheStep):
    """vector environment Lies-v0 states AutoresetMode.NEXT_STEP, but resets within"""


# What constructors want.


@hostile
class MissingArgument(Base):
    """missing 1 required positional argument: 'map_name': .* --env_args NAME=VALUE"""

    def __init__(self, map_name):
        pass


@hostile
class RaisesTypeError(Base):
    r"""'NoneType' object is not iterable \(.*hostile_envs.py:\d+\)"""

    def __init__(self):
        self.maps = list(None)


@hostile
class OneAProcess(Base):
    r"""--envs_per_actor 1 .* --envs_per_server 1 .*Cannot create multiple emulator"""

    made = False

    def __init__(self):
        if OneAProcess.made:
            raise RuntimeError("Cannot create multiple emulator instances per process")
        OneAProcess.made = True

    def close(self):
        OneAProcess.made = False
