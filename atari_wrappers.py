"""DeepMind's preprocessing of Atari (Mnih et al., 2015), as one vector environment.

    no-op start of up to 29 frames, FIRE on reset, skip 4 with max over the last two
    frames, 84x84 grey by area interpolation, stack 4: [4, 84, 84] uint8, oldest first;
    a lost life ends a training episode; rewards are not clipped (learn() does that).

There are two implementations. make_vector() is ale-py's, in C++, which training uses.
make_python() is the same from parts of Gymnasium and OpenCV, to edit and to render.
They agree pixel by pixel (tests/test_atari_wrappers.py), except that ale-py leaves the
last screen out of the newest frame where it cuts a game off after half an hour.

For the protocol of Machado et al. (2018), arXiv 1709.06009: --sticky_actions 0.25
--full_action_space --no-terminal_on_life_loss.
"""

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from torchbeast.messages import BadInput

try:
    import ale_py
except ImportError:  # Every other environment works without it.
    ale_py = None
else:
    gymnasium.register_envs(ale_py)

FRAME_SKIP = 4
FRAME_STACK = 4
NOOP_MAX = 30  # Fewer frames are before the agent's first, FIRE included.
MAX_FRAMES = 108_000  # Half an hour of play: the episode is truncated.


def _name(env_id):
    """Returns an id without Gymnasium's "module:", as in ale_py:Pong-v4."""
    return env_id.rpartition(":")[2]


def is_atari(env_id: str) -> bool:
    """Tells whether env_id is an Atari game on pixels. Raises BadInput for one of
    Gymnasium's Atari ids when ale-py is not installed."""
    spec = gymnasium.registry.get(_name(env_id))
    if spec is None:
        if ale_py is None and (env_id.startswith("ALE/") or "NoFrameskip" in env_id):
            raise BadInput(
                f"environment {env_id!r} needs ale-py: pip install ale-py "
                "opencv-python-headless"
            )
        return False
    return spec.entry_point == "ale_py.env:AtariEnv" and (
        spec.kwargs.get("obs_type", "rgb") == "rgb"
    )


def make(flags, num_envs, render_mode=None):
    """Makes the game that the flags (polybeast_env.environment_parser()) name, with
    make_vector(), or with make_python() where it is to be rendered."""
    if flags.env_args:
        raise BadInput(
            "--env_args: Atari's games have --sticky_actions, --full_action_space and "
            "--terminal_on_life_loss instead"
        )
    options = dict(
        sticky_actions=flags.sticky_actions,
        full_action_space=flags.full_action_space,
        terminal_on_life_loss=flags.terminal_on_life_loss,
    )
    if render_mode is None:
        return make_vector(flags.env, num_envs, **options)
    return make_python(flags.env, num_envs, render_mode=render_mode, **options)


def make_vector(
    env_id: str,
    num_envs: int,
    *,
    sticky_actions: float | None = None,  # None: as env_id is registered.
    full_action_space: bool = False,
    terminal_on_life_loss: bool = True,
    noop_max: int = NOOP_MAX,
) -> VectorEnv:
    """Makes num_envs games that ale-py steps in C++, on one thread."""
    kwargs = gymnasium.spec(_name(env_id)).kwargs
    env = ale_py.AtariVectorEnv(
        kwargs["game"],
        num_envs,
        num_threads=1,
        repeat_action_probability=_sticky(kwargs, sticky_actions),
        full_action_space=full_action_space,
        max_num_frames_per_episode=MAX_FRAMES,
        frameskip=FRAME_SKIP,
        stack_num=FRAME_STACK,
        noop_max=noop_max,
        reward_clipping=False,
    )
    meanings = [ale_py.Action(a).name for a in env.ale.get_action_set()]
    return AtariEpisodes(env, meanings, terminal_on_life_loss)


def make_python(
    env_id: str,
    num_envs: int,
    *,
    sticky_actions: float | None = None,
    full_action_space: bool = False,
    terminal_on_life_loss: bool = True,
    noop_max: int = NOOP_MAX,
    render_mode: str | None = None,
) -> VectorEnv:
    """Makes num_envs games of Python wrappers, which step one after the other."""
    kwargs = gymnasium.spec(_name(env_id)).kwargs

    def make():
        env = gymnasium.make(
            _name(env_id),
            frameskip=1,
            repeat_action_probability=_sticky(kwargs, sticky_actions),
            full_action_space=full_action_space,
            max_num_frames_per_episode=None,  # TimeLimit below: no-ops don't count.
            render_mode=render_mode,
            disable_env_checker=True,
        )
        env = StartOfGame(env, noop_max)
        env = gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=0, frame_skip=FRAME_SKIP, screen_size=84
        )
        env = gymnasium.wrappers.FrameStackObservation(
            env, FRAME_STACK, padding_type="zero"
        )
        return gymnasium.wrappers.TimeLimit(env, MAX_FRAMES // FRAME_SKIP)

    env = SyncVectorEnv([make] * num_envs)
    meanings = env.envs[0].unwrapped.get_action_meanings()
    return AtariEpisodes(env, meanings, terminal_on_life_loss)


def _sticky(kwargs, sticky_actions):
    if sticky_actions is None:
        return kwargs["repeat_action_probability"]
    return sticky_actions


class StartOfGame(gymnasium.Wrapper):
    """Presses FIRE, then makes a random number of no-ops. Steps single frames."""

    def __init__(self, env, noop_max):
        super().__init__(env)
        self.noop_max = noop_max
        meanings = env.unwrapped.get_action_meanings()
        self.fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, *, seed=None, options=None):
        """options["noops"]: number of frames, FIRE included (default: random)."""
        options = dict(options or {})
        noops = options.pop("noops", None)
        observation, info = self.env.reset(seed=seed, options=options)
        if noops is None:
            noops = self.unwrapped.np_random.integers(max(self.noop_max, 1))
        if self.fire is not None:
            observation, *_, info = self.env.step(self.fire)
            noops -= 1
        for _ in range(noops):
            observation, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                observation, info = self.env.reset()
        return observation, info


class AtariEpisodes(VectorWrapper):
    """A lost life terminates the training episode; info["episode_end"] [E] bool tells
    where the game ended.

    The step after a lost life ignores its action, as an autoreset does, and presses
    FIRE (where the game has it): some games wait for it before each life.
    """

    frames_per_step = FRAME_SKIP

    def __init__(self, env, action_meanings, terminal_on_life_loss):
        super().__init__(env)
        self.metadata = {**env.metadata, "render_fps": 60}  # ale-py says 30.
        self.after_loss = (
            action_meanings.index("FIRE") if "FIRE" in action_meanings else 0
        )
        self.terminal_on_life_loss = terminal_on_life_loss

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        self.lives = info["lives"].copy()
        self.lost = np.zeros(self.num_envs, bool)
        return observation, info

    def step(self, actions):
        actions = np.where(self.lost, self.after_loss, actions)
        observation, reward, terminated, truncated, info = self.env.step(actions)
        info["episode_end"] = terminated | truncated
        if self.terminal_on_life_loss:
            lives = info["lives"]
            self.lost = (lives < self.lives) & ~info["episode_end"]
            terminated = terminated | self.lost
            self.lives = lives.copy()
        return observation, reward, terminated, truncated, info
