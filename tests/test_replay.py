"""The replay: what goes in comes out, as often as it should."""

import itertools
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

import polybeast_env
from tests import envs
from tests.faulty_envs import Nested
from tests.test_agent import batches, make_actor, parse
from torchbeast import environment, machine, process, ranks, replay, storage
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.replay import Credit, Replay, SumTree

T, B = 7, 3
CPU = torch.device("cpu")


def rollouts_of(make_env, num, unroll_length=T, num_envs=B, args=()):
    """Batches [T + 1, B, ...], one after the other, of a policy that is nearly
    uniform."""
    flags = parse("--unroll_length", unroll_length, *args)
    env = environment.Environment([make_env() for _ in range(num_envs)])
    yield from itertools.islice(batches(*make_actor(flags, env)), num)


def whole(num_rollouts, num_steps=T + 1):
    return Replay(num_rollouts, 1, num_steps, CPU)


def one_by_one(num_rollouts, num_steps, unroll_length=T):
    return Replay(num_rollouts, unroll_length, num_steps, CPU)


def assert_same(a, b):
    for (path, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), path


# The sum tree.


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000])
def test_sum_tree_finds_what_adding_up_finds(size):
    rng = np.random.default_rng(size)
    tree, numbers = SumTree(size), np.zeros(size)
    for _ in range(20):
        indices = rng.integers(size, size=min(size, 30))
        values = rng.integers(3, size=len(indices)) / 4  # Exact, and often 0.
        tree[indices] = values
        numbers[indices] = values
        if numbers.sum() == 0:
            continue
        assert tree.total == numbers.sum()
        np.testing.assert_array_equal(tree[np.arange(size)], numbers)
        mass = np.append(rng.random(50) * numbers.sum(), 0)
        expected = np.searchsorted(np.cumsum(numbers), mass, side="right")
        np.testing.assert_array_equal(tree.find(mass), expected)


def test_sum_tree_never_finds_a_zero_however_sums_are_rounded():
    rng = np.random.default_rng(1)
    tree = SumTree(1000)
    tree[np.arange(1000)] = np.where(rng.random(1000) < 0.5, rng.random(1000) ** 9, 0)
    mass = tree.total * (1 - np.append(rng.random(1000) * 1e-15, 0))
    assert (tree[tree.find(mass)] > 0).all()


def test_samples_are_drawn_as_often_as_their_priorities_say():
    ring = one_by_one(4, 2)
    for batch in rollouts_of(envs.Counter, 1):
        items = ring.add(batch)
    rng = np.random.default_rng(1)
    priorities = rng.random(items.shape)
    priorities[2] = 0
    ring.set_priorities(items, priorities)
    torch.manual_seed(1)
    shares = (priorities / priorities.sum()).reshape(-1)
    counts = np.zeros(4 * T)
    draws = 2000
    for _ in range(draws):
        _, drawn = ring.sample(1)  # More than 1 are not independent.
        counts[drawn] += 1
    expected = draws * shares
    counts = counts[items.reshape(-1)]
    assert counts[expected == 0].sum() == 0
    drawable = expected > 0
    chi_square = ((counts - expected)[drawable] ** 2 / expected[drawable]).sum()
    degrees = drawable.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)  # One time in 10,000 more.


def test_what_has_a_share_of_one_sample_is_in_each_batch():
    ring = one_by_one(2, 2)
    for batch in rollouts_of(envs.Counter, 1, num_envs=2):
        items = ring.add(batch)
    ring.set_priorities(items, np.where(np.arange(2 * T).reshape(T, 2) == 5, 4, 1))
    for _ in range(20):
        _, drawn = ring.sample(8)
        assert items[2, 1] in drawn


# The ring.


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
@pytest.mark.parametrize("make_env", [envs.Counter, Nested, envs.CatchPixels])
def test_whole_rollouts_come_out_as_they_went_in(make_env, args):
    num = 5  # Not a multiple of B: it wraps around within a batch.
    ring, newest = whole(num), {}
    for batch in rollouts_of(make_env, 6, args=args):
        items = ring.add(batch)[0]
        for b, item in enumerate(items):
            newest[item] = map_structure(lambda x, b=b: x[:, b : b + 1], batch)
        for item, rollout in newest.items():
            assert_same(ring.read(np.array([item])), rollout)
    assert sorted(newest) == list(range(num))
    assert ring.size == num and ring.added == 6 * B


def test_samples_of_some_steps_are_consecutive_and_end_with_their_rollout():
    ring = one_by_one(5, 4)
    for batch in rollouts_of(envs.Counter, 6):
        items = ring.add(batch)
        ring.set_priorities(items, np.ones_like(items))
    torch.manual_seed(1)
    for _ in range(20):
        sample, drawn = ring.sample(16)
        total, episode, t = sample["observation"].unbind(-1)
        done, reward = sample["done"], sample["reward"]
        start = torch.as_tensor(drawn % T)
        for i in range(1, 4):
            inside = start + i <= T
            assert (total[i] == total[i - 1] + 1)[inside].all()
            assert done[i][~inside].all()  # No transition leads there.
            within_episode = inside & ~done[i]
            assert (episode[i] == episode[i - 1])[within_episode].all()
            assert (reward[i] == t[i])[within_episode].all()
            assert (sample["last_action"][i] == sample["action"][i - 1])[
                within_episode
            ].all()


def test_new_rollouts_are_not_drawn_by_the_priorities_of_those_they_replace():
    ring = whole(B)
    first, second = rollouts_of(envs.Counter, 2)
    items = ring.add(first)
    ring.set_priorities(items, np.ones_like(items))
    items = ring.add(second)
    ring.set_priorities(items[:, :1], [[1]])
    _, drawn = ring.sample(4)
    assert (drawn == items[0, 0]).all()


def test_late_priorities_count_once_the_next_ones_are_set():
    ring = whole(2 * B)
    first, second = rollouts_of(envs.Counter, 2)
    items = ring.add(first)[0]
    ring.set_priorities(items, [1, 3, 0])
    ring.set_priorities(items, [0, 0, 1], late=True)
    sample, drawn = ring.sample(4, importance_exponent=1)
    assert list(drawn) == [items[0], *3 * [items[1]]]  # And are weighted so.
    assert sample["importance"][0].tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    ring.set_priorities(items, [0, 1, 0], late=True)
    assert set(ring.sample(4)[1]) == {items[2]}
    ring.add(second)
    assert set(ring.sample(4)[1]) == {items[1]}
    ring.set_priorities(items, [1, 2, 3], late=True)
    assert list(ring.arrays()["priorities"][items]) == [1, 2, 3]  # What is saved.


def test_importance_undoes_the_probabilities():
    ring = whole(B)
    (batch,) = rollouts_of(envs.Counter, 1)
    items = ring.add(batch)
    ring.set_priorities(items, [[1, 2, 5]])
    sample, drawn = ring.sample(16, importance_exponent=0.5)
    p = np.array([1, 2, 5])[drawn] / 8
    expected = p**-0.5 / (p**-0.5).max()
    np.testing.assert_allclose(sample["importance"][0], expected, rtol=1e-6)
    sample, _ = ring.sample(16)
    assert (sample["importance"] == 1).all()


def test_age_is_of_the_rollouts_that_came_later(monkeypatch):
    ring = whole(2 * B)
    for batch in rollouts_of(envs.Counter, 2):
        items = ring.add(batch)[0]
    assert ring.age(items) == 1  # 2, 1 and 0.
    assert ring.age(items[-1:]) == 0
    monkeypatch.setattr(ranks.current, "num", 2)
    assert ring.age(items) == 2  # Another learner added as many.


# Frames.


def frames_stored(ring):
    return isinstance(ring._store._tensors["observation"], storage._Frames)


@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_stacked_frames_are_kept_once_and_come_out_bit_for_bit(game):
    unroll_length, num = 60, 4
    flags = parse("--unroll_length", unroll_length)
    flags.env = f"{game}NoFrameskip-v4"
    env = polybeast_env.create_env(flags, 3)
    ring = one_by_one(num, 6, unroll_length)
    begun = 0
    for batch in itertools.islice(batches(*make_actor(flags, env)), 4):
        items = ring.add(batch)
        begun += int((batch["episode_step"] == 0)[1:].sum())
        for b in range(3):
            sample = ring.read(items[:, b])
            for i in range(6):
                times = (torch.arange(unroll_length) + i).clamp(max=unroll_length)
                inside = torch.arange(unroll_length) + i <= unroll_length
                expected = batch["observation"][times, b]
                assert torch.equal(sample["observation"][i][inside], expected[inside])
    env.close()
    assert frames_stored(ring)
    if game == "Breakout":
        assert begun > 0  # Stacks began anew within a rollout.


def test_images_that_are_no_stacks_are_kept_whole():
    torch.manual_seed(1)
    (batch,) = rollouts_of(envs.Counter, 1)
    batch["observation"] = torch.randint(255, (T + 1, B, 4, 8, 8), dtype=torch.uint8)
    ring = whole(B)
    items = ring.add(batch)[0]
    assert not frames_stored(ring)
    assert_same(ring.read(items), batch)


class Stacked(envs.Counter):
    """Gymnasium's stacks: the first frame of an episode is repeated. Or, with other
    padding, zeros."""

    def __new__(cls, padding="reset"):
        class Frames(envs.Counter):
            observation_space = spaces.Box(0, 255, (6, 6), np.uint8)

            def __init__(self):
                super().__init__(limit=9)
                self.observation_space = Frames.observation_space

            def _observation(self):
                return np.full((6, 6), 1 + self.total % 250, np.uint8)

        return FrameStackObservation(Frames(), 4, padding_type=padding)


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("args", [[], ["--one_episode_rollouts"]])
def test_stacks_that_begin_in_another_way_come_out_too(padding, args):
    flags = parse("--unroll_length", T, *args)
    env = environment.Environment([Stacked(padding) for _ in range(B)])
    ring, kept = whole(7), {}
    for batch in batches(*make_actor(flags, env)):
        for b, item in enumerate(ring.add(batch)[0]):
            kept[item] = map_structure(lambda x, b=b: x[:, b : b + 1], batch)
        if ring.added > 40:
            break
    assert frames_stored(ring)
    for item, rollout in kept.items():
        got, mask = ring.read(np.array([item])), rollout.get("mask", torch.tensor(True))
        same = (got["observation"] == rollout["observation"]).flatten(2).all(2)
        assert (same | ~mask).all()
        whole_ones = ring._store._tensors["observation"]._whole.get(item, {})
        assert len(whole_ones) <= (4 if padding == "reset" else 1)


def noise(num=1):
    """Batches of images that are no stacks of frames."""
    for batch in rollouts_of(envs.Counter, num):
        shape = T + 1, B, 4, 8, 8
        yield {**batch, "observation": torch.randint(255, shape, dtype=torch.uint8)}


def test_images_that_stay_as_they_are_are_not_taken_for_stacks():
    first, second = noise(2)
    first["observation"] = torch.full_like(first["observation"], 200)
    ring = whole(2 * B)
    ring.add(first)
    items = ring.add(second)[0]
    assert not frames_stored(ring)
    assert_same(ring.read(items), second)


def test_images_kept_whole_beside_frames_are_refused_where_memory_ends():
    first, *others = noise(4)
    frames = torch.randint(255, (T + 4, B, 8, 8), dtype=torch.uint8)
    first["observation"] = frames.unfold(0, 4, 1).movedim(-1, 2).contiguous()
    ring = whole(B)
    ring.add(first)
    assert frames_stored(ring)
    size, stacks = 4 * 64, ring._store._tensors["observation"]
    for batch in others:  # Each takes the place of the one before.
        ring.add(batch)
        assert stacks.num_bytes_beside == T * B * size
    ring._store._left = T * B * size - 1
    with pytest.raises(BadInput, match="--replay_size: images that are no longer"):
        ring.add(batch)


def test_images_kept_whole_beside_frames_are_the_replays_own():
    first, second = noise(2)
    frames = torch.randint(255, (T + 4, B, 8, 8), dtype=torch.uint8)
    first["observation"] = frames.unfold(0, 4, 1).movedim(-1, 2).contiguous()
    ring = whole(2 * B)
    ring.add(first)
    items = ring.add(second)[0]
    expected = second["observation"].clone()
    second["observation"].zero_()  # WarpBeast writes the next rollouts there.
    assert torch.equal(ring.read(items)["observation"], expected)


@pytest.mark.parametrize("shape", [(84, 84, 3), (3, 84, 84)])
def test_images_with_one_bright_row_or_channel_are_not_taken_for_stacks(shape):
    (batch,) = rollouts_of(envs.Counter, 1)
    batch["observation"] = torch.zeros(T + 1, B, *shape, dtype=torch.uint8)
    batch["observation"][:, :, -1] = 7
    ring = whole(B)
    ring.add(batch)
    assert not frames_stored(ring)


def test_black_images_are_not_taken_for_stacks():
    (batch,) = rollouts_of(envs.Counter, 1)
    batch["observation"] = torch.zeros(T + 1, B, 4, 8, 8, dtype=torch.uint8)
    ring = whole(B)
    ring.add(batch)
    assert not frames_stored(ring)


# Memory.


def test_too_large_a_replay_is_refused_before_memory_is_taken(monkeypatch):
    (batch,) = rollouts_of(envs.Mock, 1)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 10**9)
    ring = whole(10_000)
    with pytest.raises(
        BadInput, match=r"--replay_size: 10,000 rollouts need [\d,]+ byt"
    ):
        ring.add(batch)
    assert ring._store is None


def test_what_is_available_is_less_than_the_machine_has():
    assert 0 < machine.available_memory_bytes() < machine.memory_bytes()


def test_priorities_that_are_no_numbers_are_refused():
    ring = whole(B)
    (batch,) = rollouts_of(envs.Counter, 1)
    items = ring.add(batch)
    with pytest.raises(ValueError, match="not finite, or negative"):
        ring.set_priorities(items, np.full(items.shape, np.nan))
    with pytest.raises(RuntimeError, match="nothing has a priority"):
        ring.sample(2)


# The credit.


def new(num_rollouts, length):
    """A batch [length + 1, num_rollouts] of which nothing but its size matters."""
    return {"done": torch.zeros(length + 1, num_rollouts, dtype=torch.bool)}


def credit_of(ratio, num_before=0, num_new=4, drawable=True):
    """Of a replay of whole rollouts, of which num_new are new each time."""
    ring = SimpleNamespace(drawable=drawable, num_starts=1, num_new=num_new)
    return Credit(ring, ratio, num_before)


@pytest.mark.parametrize("ratio", [0.1, 1, 8])
def test_steps_are_learned_from_as_often_as_the_ratio_says(ratio):
    credit = credit_of(ratio, num_before=1000)
    updates = [len(list(credit.updates(new(4, 20), 20, 128))) for _ in range(1000)]
    assert sum(updates[:12]) == 0  # Not before there are 1,000 steps.
    learned, num_new = 128 * sum(updates), 80 * 988
    assert ratio * num_new - 128 < learned <= ratio * num_new
    assert credit.measured == learned / num_new


def test_what_is_due_waits_for_a_first_transition():
    credit = credit_of(1, drawable=False)
    assert len(list(credit.updates(new(4, 16), 16, 32))) == 0
    credit.ring.drawable = True
    assert len(list(credit.updates(new(4, 16), 16, 32))) == 4


def test_a_signal_ends_updates_which_are_due_when_the_run_goes_on(monkeypatch):
    """So that the batch, which is in the replay, counts."""
    signals = process.Signals()
    monkeypatch.setattr(process.Signals, "current", signals)
    credit = credit_of(1000)
    updates = credit.updates(new(4, 16), 16, 1)
    next(updates)
    signals.received = signal.SIGTERM
    assert list(updates) == []
    assert (credit.new, credit.learned) == (64, 1)


def test_what_is_burned_in_on_and_padding_are_no_new_steps():
    credit = credit_of(1, num_new=2)
    assert len(list(credit.updates(new(2, 9), 5, 1))) == 10  # The first 4 are not new.
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert len(list(credit.updates({**new(2, 2), "mask": mask}, 2, 1))) == 1


def test_steps_that_no_transition_leads_from_are_no_new_ones():
    ring = one_by_one(2 * B, 2)
    credit = Credit(ring, 1, 0)
    for batch in rollouts_of(envs.Counter, 2):
        real = ~batch["done"][1:]
        assert 0 < (num_real := int(real.sum())) < T * B
        ring.set_priorities(ring.add(batch), real)
        assert len(list(credit.updates(batch, T, 1))) == num_real


def test_padding_is_not_learned_from():
    credit = credit_of(1)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    credit.learned = 10
    credit.leave_out_padding({"mask": mask})
    assert credit.learned == 7
    credit.ring.num_starts = 2  # Samples are single transitions, which are real.
    credit.leave_out_padding({"mask": mask})
    assert credit.learned == 7


# Replay for agents that learn from new rollouts.


def test_replayed_rollouts_come_behind_new_ones_in_the_share_that_is_asked_for():
    flags = parse("--replay_fraction", 0.5, "--batch_size", B, "--unroll_length", T)
    mixer, seen = replay.Mixer(flags, torch.device("cpu")), []
    for batch in rollouts_of(envs.Counter, 5):
        seen += batch["observation"].unbind(1)
        mixed, logged = mixer.mix(batch)
        assert mixed["done"].shape == (T + 1, 2 * B)
        assert_same(map_structure(lambda x: x[:, :B], mixed), batch)
        for x in mixed["observation"][:, B:].unbind(1):
            assert any(torch.equal(x, y) for y in seen)
    assert logged["replay_size"] == 5 * B * T and logged["replay_age"] > 0
