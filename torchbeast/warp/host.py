"""Environments on the device in the other programs, and in tests: on the CPU, with a
row for each agent."""

import numpy as np
import torch

from torchbeast import environment
from torchbeast.calls import Call, count_steps
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.spaces import Actions, check_finite
from torchbeast.warp.autoreset import Environments
from torchbeast.warp.check import check


class HostEnvironment(environment.Environment):
    """num_envs environments; their rows are the agents of the first one, then those of
    the next. Raises BadInput if check() does."""

    def __init__(self, env, num_envs):
        check(env)
        self.env, self._envs = env, Environments(env, num_envs, torch.device("cpu"))
        self.name, self.texts = env.name, []
        self.num_agents = self.num_acting = self._envs.num_agents
        self.num_envs = num_envs * self.num_agents
        self.policies = self._envs.policies
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.actions = Actions(env.action_space, self.num_envs)
        self.frames_per_step, self.fps = 1, getattr(env, "fps", 30)
        self._metrics, self._carry, self._warned = [], None, False
        parts = self.policies.values()
        numbers = [np.full(p.stop - (p.start or 0), i) for i, p in enumerate(parts)]
        numbers = np.tile(np.concatenate(numbers).astype(np.uint8), num_envs)
        self._policy = {"policy": numbers} if len(parts) > 1 else {}

    @torch.inference_mode()
    def initial(self, seed=None):
        self._random = torch.Generator()
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        with Call(f"begin() of {self.name}"):
            u = self._envs.uniforms(self._random)
            self._carry, step = self._envs.begin(u)
        return self._rows(step)

    @torch.inference_mode()
    def step(self, action):
        if self._carry is None:
            raise RuntimeError("Environment.step before Environment.initial")
        _, action = self.actions.to_environment(action)
        shape = -1, self.num_agents
        action = map_structure(
            lambda x: torch.from_numpy(x).unflatten(0, shape), action
        )
        with Call(f"move() of {self.name}"):
            u = self._envs.uniforms(self._random)
            self._carry, step, metrics = self._envs.step(self._carry, action, u)
        count_steps(self.num_envs)
        totals = {name: x.tolist() for name, x in metrics.items()}
        num = max((int(n) for _, n in totals.values()), default=0)
        for _ in range(num):  # A mean for each episode that ended: all count as much.
            self.add_metrics({name: x / num for name, (x, _) in totals.items()})
        return self._rows(step)

    def _rows(self, step):
        step = map_structure(lambda x: x.flatten(0, 1).numpy().copy(), step)
        step |= self._policy
        self._mask = step.get("action_mask")
        with environment.Naming(self.name):
            for name in ("observation", "reward"):
                for path, x in leaves(step[name], name):
                    check_finite(x, path)
        return step

    def all_out(self):
        return False

    def render(self):
        if not hasattr(self.env, "draw"):
            raise BadInput(f"environment {self.name} cannot be shown: it has no draw()")
        return np.asarray(self.env.draw(self._carry["state"]))

    def close(self):
        pass
