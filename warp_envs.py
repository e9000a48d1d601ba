"""Environments on the device, for `python -m warpbeast --env warp/Tag`.

Each class is an environment, written as pure functions of tensors that hold many of
them. torchbeast/warp/autoreset.py describes the functions and the shapes, docs/warp.md
how to write an environment. Write yours here, or in a module of your own:
--env my_module:warp/MyEnv.

E is the number of environments, N the number of agents in one. A class's attributes are
the constants of its environments; --env_args gives its constructor's arguments.
"""

import math

import numpy as np
import torch
from gymnasium import spaces

from torchbeast.warp.nearest import nearest

ONE = {"agent": slice(0, 1)}  # The policies of environments with one agent.


class CartPole:
    """A pole on a cart (Barto, Sutton and Anderson, 1983), as Gymnasium's CartPole-v1:
    each step is paid 1 until the pole falls, or until step max_steps."""

    gravity, pole_mass, total_mass, half_length = 9.8, 0.1, 1.1, 0.5
    force, dt = 10.0, 0.02
    max_x, max_angle, max_steps = 2.4, 12 * 2 * math.pi / 360, 500
    start = 0.05  # Largest number in a first state.
    observation_space = spaces.Box(-np.inf, np.inf, (4,))
    action_space = spaces.Discrete(2)
    policies, num_uniforms = ONE, 4

    def begin(self, u):
        state = {"x": self.start * (2 * u[:, None] - 1)}  # [E, 1, 4]
        return {**state, "t": torch.zeros_like(u[:, :1], dtype=torch.int32)}

    def move(self, state, action):
        x, speed, angle, angular_speed = state["x"].unbind(-1)
        force = self.force * (2 * action - 1)
        cos, sin = angle.cos(), angle.sin()
        pole = self.pole_mass * self.half_length
        push = (force + pole * angular_speed.square() * sin) / self.total_mass
        inertia = 4 / 3 - self.pole_mass * cos.square() / self.total_mass
        angular = (self.gravity * sin - cos * push) / (self.half_length * inertia)
        linear = push - pole * angular * cos / self.total_mass
        x, speed = x + self.dt * speed, speed + self.dt * linear
        angle, angular_speed = (
            angle + self.dt * angular_speed,
            angular_speed + self.dt * angular,
        )
        t = state["t"] + 1
        terminated = (x.abs() > self.max_x) | (angle.abs() > self.max_angle)
        state = {"x": torch.stack([x, speed, angle, angular_speed], -1), "t": t}
        return state, torch.ones_like(x), terminated, t >= self.max_steps

    def observe(self, state):
        return state["x"]


class MountainCar:
    """A car between two hills (Moore, 1990), as Gymnasium's MountainCar-v0: each step
    costs 1 until the car is on the right hill."""

    force, gravity, max_speed, max_steps = 0.001, 0.0025, 0.07, 200
    left, right, goal = -1.2, 0.6, 0.5
    start = -0.6, -0.4
    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(3)
    policies, num_uniforms = ONE, 1

    def begin(self, u):
        low, high = self.start
        x = low + (high - low) * u  # [E, 1]
        return {"x": x, "speed": torch.zeros_like(x), "t": torch.zeros_like(x).int()}

    def move(self, state, action):
        x, t = state["x"], state["t"] + 1
        speed = state["speed"] + (action - 1) * self.force
        speed = speed - (3 * x).cos() * self.gravity
        speed = speed.clamp(-self.max_speed, self.max_speed)
        x = (x + speed).clamp(self.left, self.right)
        speed = torch.where(x <= self.left, speed.clamp(min=0), speed)
        terminated = (x >= self.goal) & (speed >= 0)
        state = {"x": x, "speed": speed, "t": t}
        return state, torch.full_like(x, -1), terminated, t >= self.max_steps

    def observe(self, state):
        return torch.stack([state["x"], state["speed"]], -1)


class Acrobot:
    """Two links that swing up (Sutton, 1996), as Gymnasium's Acrobot-v1: each step
    costs 1 until the end of the second link is above the line."""

    mass, length, center, moment, gravity = 1.0, 1.0, 0.5, 1.0, 9.8
    torque, dt, max_steps, height = 1.0, 0.2, 500, 1.0
    max_speeds = 4 * math.pi, 9 * math.pi
    start = 0.1
    observation_space = spaces.Box(-np.inf, np.inf, (6,))
    action_space = spaces.Discrete(3)
    policies, num_uniforms = ONE, 4

    def begin(self, u):
        state = {"x": self.start * (2 * u[:, None] - 1)}  # [E, 1, 4]
        return {**state, "t": torch.zeros_like(u[:, :1], dtype=torch.int32)}

    def move(self, state, action):
        x, dt, t = state["x"], self.dt, state["t"] + 1
        torque = self.torque * (action - 1)
        k1 = self._change(x, torque)  # Runge and Kutta, fourth order.
        k2 = self._change(x + dt / 2 * k1, torque)
        k3 = self._change(x + dt / 2 * k2, torque)
        k4 = self._change(x + dt * k3, torque)
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        first, second, *speeds = x.unbind(-1)
        turn = 2 * math.pi
        angles = [a - turn * (a / turn).round() for a in (first, second)]
        limits = zip(speeds, self.max_speeds)
        first, second, *_ = x = [*angles, *(s.clamp(-m, m) for s, m in limits)]
        terminated = -first.cos() - (first + second).cos() > self.height
        state = {"x": torch.stack(x, -1), "t": t}
        return state, terminated.to(first.dtype) - 1, terminated, t >= self.max_steps

    def _change(self, x, torque):
        """The time derivative of x [E, 1, 4]: two angles and their speeds."""
        m, length, c, g = self.mass, self.length, self.center, self.gravity
        a1, a2, s1, s2 = x.unbind(-1)
        cos, sin = a2.cos(), a2.sin()
        d1 = m * c**2 + m * (length**2 + c**2 + 2 * length * c * cos) + 2 * self.moment
        d2 = m * (c**2 + length * c * cos) + self.moment
        phi2 = m * c * g * (a1 + a2).sin()
        phi1 = (m * c + m * length) * g * a1.sin() + phi2
        phi1 = phi1 - m * length * c * sin * s2 * (s2 + 2 * s1)
        change2 = torque + d2 / d1 * phi1 - m * length * c * s1.square() * sin - phi2
        change2 = change2 / (m * c**2 + self.moment - d2.square() / d1)
        change1 = -(d2 * change2 + phi1) / d1
        return torch.stack([s1, s2, change1, change2], -1)

    def observe(self, state):
        a1, a2, s1, s2 = state["x"].unbind(-1)
        return torch.stack([a1.cos(), a1.sin(), a2.cos(), a2.sin(), s1, s2], -1)


class Pendulum:
    """A pendulum to balance upright, as Gymnasium's Pendulum-v1: angle, speed and
    torque cost."""

    gravity, mass, length, dt = 10.0, 1.0, 1.0, 0.05
    max_speed, max_steps = 8.0, 200
    speed_cost, torque_cost = 0.1, 0.001
    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Box(-2, 2, (1,))  # The torque.
    policies, num_uniforms = ONE, 2

    def begin(self, u):
        angle, speed = (2 * u[:, :1] - 1) * math.pi, 2 * u[:, 1:] - 1
        return {"angle": angle, "speed": speed, "t": torch.zeros_like(u[:, :1]).int()}

    def move(self, state, action):
        angle, speed, t = state["angle"], state["speed"], state["t"] + 1
        torque = action[..., 0]
        off = angle - 2 * math.pi * (angle / (2 * math.pi)).round()
        cost = off.square() + self.speed_cost * speed.square()
        cost = cost + self.torque_cost * torque.square()
        pull = 3 * self.gravity / (2 * self.length) * angle.sin()
        push = 3 / (self.mass * self.length**2) * torque
        speed = speed + self.dt * (pull + push)
        speed = speed.clamp(-self.max_speed, self.max_speed)
        state = {"angle": angle + self.dt * speed, "speed": speed, "t": t}
        return state, -cost, torch.zeros_like(t, dtype=torch.bool), t >= self.max_steps

    def observe(self, state):
        angle = state["angle"]
        return torch.stack([angle.cos(), angle.sin(), state["speed"]], -1)


class Catch:
    """A ball falls down a board, one row a step. At the bottom the reward is 1 if the
    paddle is there, else -1 (bsuite, Osband et al., 2020)."""

    rows, columns = 10, 5
    observation_space = spaces.Box(0, 1, (rows, columns))
    action_space = spaces.Discrete(3)
    policies, num_uniforms = ONE, 1

    def begin(self, u):
        ball = (u * self.columns).int().clamp(max=self.columns - 1)  # [E, 1]
        paddle = torch.full_like(ball, self.columns // 2)
        return {"row": torch.zeros_like(ball), "ball": ball, "paddle": paddle}

    def move(self, state, action):
        row, ball = state["row"] + 1, state["ball"]
        paddle = (state["paddle"] + action.int() - 1).clamp(0, self.columns - 1)
        last = row >= self.rows - 1
        reward = torch.where(last, 2.0 * (paddle == ball) - 1, 0)
        state = {"row": row, "ball": ball, "paddle": paddle}
        return state, reward, last, torch.zeros_like(last)

    def observe(self, state):
        places = torch.arange(self.rows * self.columns, device=state["row"].device)
        ball = state["row"] * self.columns + state["ball"]
        paddle = (self.rows - 1) * self.columns + state["paddle"]
        board = (places == ball[..., None]) | (places == paddle[..., None])
        return board.float().unflatten(-1, (self.rows, self.columns))


def expect(kind, low, high=math.inf, **arguments):
    """Raises ValueError that names the argument unless its value is a number of this
    kind (int or float) from low to high."""
    for name, x in arguments.items():
        is_number = isinstance(x, (int, kind)) and not isinstance(x, bool)
        if not is_number or not low <= x <= high or math.isinf(x):
            what = "an integer" if kind is int else "a number"
            limits = f"{low} or more" if high == math.inf else f"{low} to {high}"
            raise ValueError(f"{name} is {x!r}, expected {what}, {limits}")


class TagGridWorld:
    """Taggers against one runner on a grid (WarpDrive, Lan et al., arXiv 2108.13976).

    The runner is the last agent. Actions: stay, or one step along x or y, in either
    direction. An episode ends when a tagger is on the runner's cell, or after max_steps
    steps; the agents see the time.

    observation: "full" shows x and y of each agent, whether it is the runner, whether
    it is oneself, and the time. "partial" shows oneself, the nearest agent of the other
    kind, one's own kind, and the time.
    one_policy: taggers and runner are one policy, "shared", as in WarpDrive's run.
    """

    tag_reward, tag_penalty, step_cost, wall_cost = 10.0, 5.0, 0.01, 0.1

    def __init__(
        self,
        num_taggers=4,
        size=20,
        max_steps=100,
        observation="full",
        random_starts=True,
        one_policy=False,
    ):
        expect(int, 1, num_taggers=num_taggers, size=size, max_steps=max_steps)
        if observation not in ("full", "partial"):
            raise ValueError(f"observation is {observation!r}, expected full, partial")
        for name, x in dict(random_starts=random_starts, one_policy=one_policy).items():
            if not isinstance(x, bool):
                raise ValueError(f"{name} is {x!r}, expected a bool")
        self.size, self.max_steps, self.full = size, max_steps, observation == "full"
        self.random_starts = random_starts
        self.num_agents = N = num_taggers + 1
        self.policies = {"tagger": slice(0, N - 1), "runner": slice(N - 1, N)}
        if one_policy:
            self.policies = {"shared": slice(0, N)}
        numbers = 4 * N + 1 if self.full else 6
        self.observation_space = spaces.Box(0, 1, (numbers,))
        self.action_space = spaces.Discrete(5)
        self.num_uniforms = 2 * N if random_starts else 0
        self.dx = torch.tensor([0, 1, -1, 0, 0])
        self.dy = torch.tensor([0, 0, 0, 1, -1])
        self.is_runner = torch.arange(N) == N - 1
        kinds = self.is_runner.double()
        self.fixed = torch.cat([kinds.expand(N, N), torch.eye(N)], 1)

    def begin(self, u):
        E, N = len(u), self.num_agents
        if self.random_starts:
            at = (u * (self.size + 1)).long().clamp(max=self.size)
            x, y = at.chunk(2, 1)  # [E, N]
        else:
            x = y = torch.where(self.is_runner, 0, self.size // 2).expand(E, N)
        return {"x": x, "y": y, "t": torch.zeros_like(x[:, 0])}

    def move(self, state, action):
        t = state["t"] + 1
        to_x, to_y = state["x"] + self.dx[action], state["y"] + self.dy[action]
        state = {"x": to_x.clamp(0, self.size), "y": to_y.clamp(0, self.size), "t": t}
        tagged = self._tagged(state)[:, None]
        # A step without a tag costs each tagger what it pays the runner.
        of_taggers = torch.where(tagged, self.tag_reward, -self.step_cost)
        of_runner = torch.where(tagged, -self.tag_penalty, self.step_cost)
        reward = torch.where(self.is_runner, of_runner, of_taggers)
        hit = (state["x"] != to_x) | (state["y"] != to_y)
        reward = reward - self.wall_cost * hit
        over = (tagged | (t >= self.max_steps)[:, None]).expand(reward.shape)
        return state, reward, over, torch.zeros_like(over)

    def _tagged(self, state):
        """[E] bool, whether a tagger is on the runner's cell."""
        cell = state["x"] * (self.size + 1) + state["y"]
        return (cell[:, :-1] == cell[:, -1:]).any(1)

    def observe(self, state):
        x, y = state["x"], state["y"]
        E, N = x.shape
        time = (state["t"] / self.max_steps)[:, None]
        if self.full:
            at = torch.cat([x, y], 1) / self.size
            parts = at[:, None].expand(E, N, 2 * N), self.fixed.expand(E, N, 2 * N)
            return torch.cat([*parts, time[..., None].expand(E, N, 1)], -1)
        far = (x[:, :-1] - x[:, -1:]).square() + (y[:, :-1] - y[:, -1:]).square()
        tagger = far.min(1, keepdim=True).indices  # [E, 1], the nearest one
        parts = [x / self.size, y / self.size]
        for z in parts[:2]:
            other = torch.where(self.is_runner, z.gather(1, tagger), z[:, -1:])
            parts.append(other)
        kind = self.is_runner.to(time.dtype)
        return torch.stack([*parts, kind.expand(E, N), time.expand(E, N)], -1)

    def metrics(self, state):
        return {"tagged": self._tagged(state).float()}

    def draw(self, state):
        at = torch.stack([state["x"][0], state["y"][0]], -1).float()
        return _draw(at, self.is_runner, self.size)


class Tag:
    """Taggers against runners on a plane (WarpDrive, section 4).

    An agent changes its acceleration and its direction: if actions is "levels", by one
    of `levels` changes of each, or none; else by two numbers. A runner nearer to a
    tagger than tagging_distance * size leaves the game: this costs the runner, and pays
    the tagger that is nearest. An episode ends after max_steps steps, or with the last
    runner. Runners that are left at its end are paid; all agents see the time.

    An agent sees its nearest others that are in the game, `num_nearest` of them: how
    far ahead and to its left they are, how much faster they go and accelerate, the
    angle between their direction and its own, whether each is a tagger and whether
    there is one; and the time. (WarpDrive's agents see x and y, but not their own
    direction.)
    """

    tag_reward, tag_penalty, end_reward = 10.0, 10.0, 1.0

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
        expect(int, 1, num_taggers=num_taggers, num_runners=num_runners)
        N = num_taggers + num_runners
        expect(int, 1, max_steps=max_steps)
        expect(int, 1, N - 1, num_nearest=num_nearest)
        expect(int, 2, levels=levels)
        expect(float, 1e-3, size=size, max_speed=max_speed)
        expect(float, 1e-3, tagger_skill=tagger_skill, runner_skill=runner_skill)
        expect(float, 1e-3, max_acceleration=max_acceleration, max_turn=max_turn)
        expect(float, 0, tagging_distance=tagging_distance, edge_cost=edge_cost)
        if actions not in ("levels", "numbers"):
            raise ValueError(f"actions is {actions!r}, expected levels, numbers")
        self.num_agents, self.num_taggers = N, num_taggers
        self.num_nearest = num_nearest
        self.size, self.max_steps, self.max_speed = size, max_steps, max_speed
        self.tagging_distance, self.edge_cost = tagging_distance, edge_cost
        self.policies = {
            "tagger": slice(0, num_taggers),
            "runner": slice(num_taggers, N),
        }
        largest = torch.tensor([max_acceleration, max_turn], dtype=torch.float64)
        self.changes = None
        self.action_space = spaces.Box(
            -largest.float().numpy(), largest.float().numpy()
        )
        if actions == "levels":
            self.action_space = spaces.MultiDiscrete([levels + 1, levels + 1])
            some = torch.linspace(-1, 1, levels, dtype=torch.float64)
            # [levels + 1, 2]
            self.changes = torch.cat([torch.zeros(1, 2), some[:, None] * largest])
        self.observation_space = spaces.Box(-np.inf, np.inf, (7 * num_nearest + 1,))
        self.num_uniforms = 3 * N
        self.is_tagger = torch.arange(N) < num_taggers
        skills = [tagger_skill] * num_taggers + [runner_skill] * num_runners
        self.fastest = max_speed * torch.tensor(skills, dtype=torch.float64)  # [N]

    def begin(self, u):
        u = u.view(len(u), self.num_agents, 3)
        direction = (4 * u[..., 2]).floor() * (math.pi / 2)
        zeros = torch.zeros_like(direction)
        state = {"at": self.size * u[..., :2], "direction": direction}
        state.update(speed=zeros, acceleration=zeros)
        alive = torch.ones_like(direction, dtype=torch.bool)
        return {**state, "alive": alive, "t": torch.zeros_like(u[:, 0, 0]).int()}

    def move(self, state, action):
        alive, t = state["alive"], state["t"] + 1  # [E, N], [E]
        if self.changes is None:
            accelerate, turn = action.unbind(-1)
        else:
            accelerate, turn = (self.changes[:, i][action[..., i]] for i in range(2))
        direction = (state["direction"] + turn) % (2 * math.pi) * alive
        acceleration = state["acceleration"] + accelerate
        wanted = state["speed"] + acceleration
        speed = wanted.clamp(min=0).minimum(self.fastest) * alive
        at_bound = (speed <= 0) | (speed >= self.fastest)
        acceleration = torch.where(at_bound, 0, acceleration)
        heading = torch.stack([direction.cos(), direction.sin()], -1)
        to = state["at"] + speed[..., None] * heading
        at = to.clamp(0, self.size)
        G, E = self.num_taggers, len(t)
        runs = alive[:, G:]  # [E, R]
        apart = at[:, G:, None] - at[:, None, :G]
        near, tagger = apart.square().sum(-1).min(-1)  # [E, R]
        tagged = runs & (near < (self.tagging_distance * self.size) ** 2)
        left = runs & ~tagged
        over = (t >= self.max_steps) | ~left.any(1)  # [E]
        ended = (t >= self.max_steps)[:, None]
        of_runners = self.end_reward * (left & ended) - self.tag_penalty * tagged
        counts = torch.zeros(E, G, dtype=at.dtype, device=at.device)
        counts = counts.scatter_add(1, tagger, tagged.to(at.dtype))
        reward = torch.cat([self.tag_reward * counts, of_runners.to(at.dtype)], 1)
        reward = reward - self.edge_cost * (at != to).any(-1)
        alive = torch.cat([alive[:, :G], left], 1)
        state = {"at": at, "direction": direction, "speed": speed, "t": t}
        state.update(acceleration=acceleration, alive=alive)
        return state, reward, over[:, None] | ~alive, torch.zeros_like(alive)

    def observe(self, state):
        at, alive = state["at"], state["alive"]
        E, N, K = len(at), self.num_agents, self.num_nearest
        index, there = nearest(at, alive, K)  # [E, N, K]
        speed, acceleration = state["speed"], state["acceleration"]
        of_all = [*at.unbind(-1), speed, acceleration, state["direction"]]
        scales = [2**0.5 * self.size] * 2 + [self.max_speed] * 2 + [2 * math.pi]
        features = torch.stack(of_all, 1)  # [E, 5, N]
        others = features.gather(2, index.view(E, 1, N * K).expand(E, 5, N * K))
        relative = others.view(E, 5, N, K) - features[..., None]
        x, y, *others = relative.unbind(1)  # [E, N, K]
        direction = state["direction"][..., None]
        cos, sin = direction.cos(), direction.sin()
        relative = [x * cos + y * sin, y * cos - x * sin, *others]
        parts = [x / scale for x, scale in zip(relative, scales)]
        parts = [*parts, self.is_tagger[index], torch.ones_like(at[..., :1])]
        there = there & alive[..., None]
        parts = [torch.where(there, x, 0).to(at.dtype) for x in parts]
        time = (state["t"] / self.max_steps)[:, None].expand(E, N)
        time = torch.where(alive, time, 0).to(at.dtype)
        return torch.cat([*parts, time[..., None]], -1)

    def metrics(self, state):
        runs = state["alive"][:, self.num_taggers :]
        return {"tagged": 1 - runs.float().mean(1)}

    def draw(self, state):
        alive = state["alive"][0]
        runs = ~self.is_tagger[alive]
        radius = self.tagging_distance * self.size
        return _draw(state["at"][0][alive], runs, self.size, radius)


def _draw(at, is_runner, size, radius=None):
    """Draws agents at places [N, 2] from 0 to size, runners blue and taggers red, with
    a circle of this radius around each tagger."""
    import cv2  # Not everybody draws.

    scale, edge = 480 / size, 20
    picture = np.full((480 + 2 * edge, 480 + 2 * edge, 3), 255, np.uint8)
    cv2.rectangle(picture, (edge, edge), (edge + 480, edge + 480), (0, 0, 0), 1)
    for (x, y), runs in zip(at.cpu().tolist(), is_runner.cpu().tolist()):
        place = edge + round(x * scale), edge + 480 - round(y * scale)
        cv2.circle(picture, place, 5, (40, 90, 220) if runs else (220, 60, 40), -1)
        if radius is not None and not runs:
            cv2.circle(picture, place, round(radius * scale), (220, 60, 40), 1)
    return picture
