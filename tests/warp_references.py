"""The environments of warp_envs.py again: Gymnasium's own, and plain loops in NumPy
(torchbeast/warp/consistency.py says what a reference is)."""

import math

import gymnasium
import numpy as np

from tests import envs


class Gymnasiums:
    """One of Gymnasium's. Its state is `fields` of ours, in this order."""

    fields = ("x",)

    def __init__(self, env_id):
        self.env = gymnasium.make(env_id, disable_env_checker=True).unwrapped
        self.max_steps = gymnasium.spec(env_id).max_episode_steps
        self.env.reset()

    def begin(self, u):
        low, high = self.start
        return self.pack(low + (high - low) * u.astype(np.float64), 0)

    def move(self, state, action):
        self.env.state = self.unpack(state)
        self.env.steps_beyond_terminated = None
        t = state["t"][0] + 1
        _, reward, terminated, _, _ = self.env.step(self.action(action))
        state = self.pack(np.array(self.env.state, np.float64), t)
        over = np.array([t >= self.max_steps])
        return state, np.array([reward]), np.array([terminated]), over

    def observe(self, state):
        self.env.state = self.unpack(state)
        return self.observation()[None]

    def action(self, action):
        return int(action[0])

    def pack(self, x, t):
        return {"x": x[None], "t": np.array([t], np.int32)}

    def unpack(self, state):
        return state["x"][0].astype(np.float64)


class CartPole(Gymnasiums):
    start = -0.05, 0.05

    def __init__(self):
        super().__init__("CartPole-v1")

    def observation(self):
        return self.env.state


class MountainCar(Gymnasiums):
    start = -0.6, -0.4

    def __init__(self):
        super().__init__("MountainCar-v0")

    def pack(self, x, t):
        x = np.resize(x, 2) if len(x) == 2 else np.array([x[0], 0])
        return {"x": x[:1], "speed": x[1:], "t": np.array([t], np.int32)}

    def unpack(self, state):
        return tuple(float(state[name][0]) for name in ("x", "speed"))

    def observation(self):
        return np.array(self.env.state)


class Acrobot(Gymnasiums):
    start = -0.1, 0.1

    def __init__(self):
        super().__init__("Acrobot-v1")

    def observation(self):
        return self.env._get_ob()


class Pendulum(Gymnasiums):
    start = np.array([-math.pi, -1]), np.array([math.pi, 1])

    def __init__(self):
        super().__init__("Pendulum-v1")

    def action(self, action):
        return action[0].astype(np.float64)

    def pack(self, x, t):
        return {"angle": x[:1], "speed": x[1:], "t": np.array([t], np.int32)}

    def unpack(self, state):
        return np.array([state["angle"][0], state["speed"][0]], np.float64)

    def observation(self):
        return self.env._get_obs()


class Catch:
    """tests.envs.Catch."""

    def __init__(self):
        self.env = envs.Catch()

    def begin(self, u):
        self.env.reset()
        self.env.column = min(int(u[0] * 5), 4)
        return self._state()

    def move(self, state, action):
        self._set(state)
        _, reward, last, _, _ = self.env.step(int(action[0]))
        return self._state(), np.array([reward]), np.array([last]), np.array([False])

    def observe(self, state):
        self._set(state)
        return self.env._board()[None]

    def _set(self, state):
        names = ("row", "ball", "paddle")
        env = self.env
        env.row, env.column, env.paddle = (int(state[name][0]) for name in names)

    def _state(self):
        numbers = dict(row=self.env.row, ball=self.env.column, paddle=self.env.paddle)
        return {name: np.array([x], np.int32) for name, x in numbers.items()}


class TagGridWorld:
    def __init__(
        self,
        num_taggers=4,
        size=20,
        max_steps=100,
        observation="full",
        random_starts=True,
    ):
        self.N, self.size, self.max_steps = num_taggers + 1, size, max_steps
        self.full, self.random_starts = observation == "full", random_starts

    def begin(self, u):
        at = np.zeros((self.N, 2), int)
        for i in range(self.N):
            for d in range(2):
                if self.random_starts:
                    cell = math.floor(u[d * self.N + i] * (self.size + 1))
                    at[i, d] = min(cell, self.size)
                elif i < self.N - 1:
                    at[i, d] = self.size // 2
        return self._state(at, 0)

    def _state(self, at, t):
        return {"x": at[:, 0], "y": at[:, 1], "t": np.array(t)}

    def move(self, state, action):
        at, t = np.stack([state["x"], state["y"]], 1), int(state["t"]) + 1
        reward = np.zeros(self.N)
        for i, a in enumerate(action):
            if a > 0:
                d, sign = divmod(int(a) - 1, 2)
                at[i, d] += -1 if sign else 1
                if not 0 <= at[i, d] <= self.size:
                    at[i, d] = min(max(at[i, d], 0), self.size)
                    reward[i] -= 0.1
        caught = any((at[i] == at[-1]).all() for i in range(self.N - 1))
        for i in range(self.N):
            runner = i == self.N - 1
            if caught:
                reward[i] += -5 if runner else 10
            else:
                reward[i] += 0.01 if runner else -0.01
        over = np.full(self.N, caught or t >= self.max_steps)
        return self._state(at, t), reward, over, np.zeros_like(over)

    def observe(self, state):
        at, N = np.stack([state["x"], state["y"]], 1), self.N
        place, time = at.astype(np.float32) / self.size, state["t"] / self.max_steps
        rows = []
        for i in range(N):
            runner = i == N - 1
            if self.full:
                kinds = [float(j == N - 1) for j in range(N)]
                own = [float(j == i) for j in range(N)]
                rows.append([*place[:, 0], *place[:, 1], *kinds, *own, time])
                continue
            other = N - 1
            if runner:
                far = [((at[j] - at[i]) ** 2).sum() for j in range(N - 1)]
                other = far.index(min(far))
            rows.append([*place[i], *place[other], float(runner), time])
        return np.array(rows, np.float32)


class Tag:
    def __init__(
        self,
        num_taggers=10,
        num_runners=100,
        size=20.0,
        max_steps=500,
        num_nearest=10,
        actions="levels",
        levels=20,
        max_speed=1.0,
        tagger_skill=1.0,
        runner_skill=1.0,
        max_acceleration=0.1,
        max_turn=0.75 * math.pi,
        tagging_distance=0.02,
        edge_cost=0.0,
    ):
        self.G, self.N = num_taggers, num_taggers + num_runners
        self.size, self.max_steps, self.K = size, max_steps, num_nearest
        self.levels = levels if actions == "levels" else None
        self.largest = max_acceleration, max_turn
        self.max_speed = max_speed
        self.fastest = [
            max_speed * (tagger_skill if i < self.G else runner_skill)
            for i in range(self.N)
        ]
        self.tagging_distance, self.edge_cost = tagging_distance, edge_cost

    def begin(self, u):
        u = u.reshape(self.N, 3)
        zeros = np.zeros(self.N, u.dtype)
        return {
            "at": u[:, :2] * self.size,
            "direction": np.array([int(4 * x) for x in u[:, 2]]) * (math.pi / 2),
            "speed": zeros,
            "acceleration": zeros.copy(),
            "alive": np.ones(self.N, bool),
            "t": np.array(0, np.int32),
        }

    def _changes(self, action):
        if self.levels is None:
            return action
        return [
            0 if a == 0 else most * (2 * (a - 1) / (self.levels - 1) - 1)
            for a, most in zip(action, self.largest)
        ]

    def move(self, state, action):
        state = {name: x.copy() for name, x in state.items()}
        at, alive, t = state["at"], state["alive"], int(state["t"]) + 1
        reward = np.zeros(self.N)
        for i in range(self.N):
            accelerate, turn = self._changes(action[i])
            state["direction"][i] = (state["direction"][i] + turn) % (2 * math.pi)
            state["acceleration"][i] += accelerate
            speed = state["speed"][i] + state["acceleration"][i]
            speed = min(max(speed, 0), self.fastest[i])
            if not alive[i]:
                speed = state["direction"][i] = 0
            if speed <= 0 or speed >= self.fastest[i]:
                state["acceleration"][i] = 0
            state["speed"][i] = speed
            angle = state["direction"][i]
            hit = False
            for d, step in enumerate(
                (speed * math.cos(angle), speed * math.sin(angle))
            ):
                at[i, d] += step
                if not 0 <= at[i, d] <= self.size:
                    at[i, d], hit = min(max(at[i, d], 0), self.size), True
            reward[i] -= self.edge_cost * hit
        radius = self.tagging_distance * self.size
        for i in range(self.G, self.N):
            if not alive[i]:
                continue
            far = [math.dist(at[i], at[j]) for j in range(self.G)]
            if min(far) < radius:
                reward[i] -= 10
                reward[far.index(min(far))] += 10
                alive[i] = False
            elif t >= self.max_steps:
                reward[i] += 1
        over = t >= self.max_steps or not alive[self.G :].any()
        state["t"] = np.array(t, np.int32)
        return state, reward, np.array([over or not a for a in alive]), ~alive & False

    def observe(self, state):
        at, alive, K = state["at"], state["alive"], self.K
        rows = np.zeros((self.N, 7 * K + 1))
        for i in range(self.N):
            if not alive[i]:
                continue
            order = sorted(
                (np.float32(((at[i] - at[j]) ** 2).sum()), j)
                for j in range(self.N)
                if j != i and alive[j]
            )
            for k, (_, j) in enumerate(order[:K]):
                x, y = (at[j] - at[i]) / (math.sqrt(2) * self.size)
                angle = state["direction"][i]
                features = [
                    x * math.cos(angle) + y * math.sin(angle),
                    y * math.cos(angle) - x * math.sin(angle),
                    (state["speed"][j] - state["speed"][i]) / self.max_speed,
                    (state["acceleration"][j] - state["acceleration"][i])
                    / self.max_speed,
                    (state["direction"][j] - state["direction"][i]) / (2 * math.pi),
                    float(j < self.G),
                    1.0,
                ]
                rows[i, k : 7 * K : K] = features
            rows[i, -1] = state["t"] / self.max_steps
        return rows
