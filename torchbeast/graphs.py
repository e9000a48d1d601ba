"""CUDA graphs: gradient steps, and act(), launched as a whole, not kernel by kernel.

    step = agent.graphs.of(gradient_step, batch)
    statistics = step(*others)

With --no-cuda_graphs, step(*others) is gradient_step(batch, *others). Else a call is
captured after the first few, and replayed in later ones: what the gradient step does on
the GPU happens again, on new numbers, and nothing of what it does in Python.
"""

import contextlib
import functools
import math
import threading
import traceback
import warnings

import torch

from torchbeast import devices, ranks
from torchbeast.messages import BadInput, Stop, first_line, log
from torchbeast.nests import leaves, map_structure

WARM_UP = 3  # Calls before one is captured: libraries get ready in them.
MAX_SHAPES = 8  # A function's batches of further shapes come too rarely.
# Gradient steps after which one is captured anew: so many old are Python's numbers.
MAX_REPLAYS = 1000

_capturing = threading.Lock()


def not_capturing(flags, device):
    """A context in which no thread captures: beside that, some versions of PyTorch draw
    no random numbers on the GPU (pytorch/pytorch#173421)."""
    captures = flags.cuda_graphs and device.type == "cuda"
    return _capturing if captures else contextlib.nullcontext()


class Graphs:
    """The graphs of what an agent's learn() does. Raises BadInput if there can be
    none."""

    def __init__(self, flags, device, optimizer):
        self._stream, self._batches, self._steps = None, {}, {}
        self._told = False  # That there are too many shapes.
        # The fastest kernel for each shape. (Without graphs acting has many shapes.)
        torch.backends.cudnn.benchmark = bool(flags.cuda_graphs)
        if not flags.cuda_graphs:
            return
        if device.type != "cuda":
            raise BadInput(f"--cuda_graphs: expected a learner on cuda, not {device}")
        if (num := ranks.current.num) > 1:  # They sum gradients within a step.
            raise BadInput(f"--cuda_graphs: expected one learner, there are {num}")
        self._stream = torch.cuda.Stream(device)
        for group in optimizer.param_groups:
            group.update(capturable=True, lr=torch.tensor(group["lr"], device=device))
        warnings.filterwarnings("ignore", ".*without CUDA graph capture")

    def of(self, gradient_step, batch):
        """Returns step(*others), for this batch. It is a nest of tensors on the GPU, as
        the step's result is; others may be constants, too."""
        if self._stream is None:
            return functools.partial(gradient_step, batch)
        key = gradient_step.__qualname__, _shapes(batch)
        if key not in self._batches:
            if sum(name == key[0] for name, _ in self._batches) == MAX_SHAPES:
                if not self._told:
                    self._told = True
                    log.info("batches of more than %d shapes: those beyond go without "
                             "CUDA graphs, and are slower", MAX_SHAPES)  # fmt: skip
                return functools.partial(gradient_step, batch)
            self._batches[key] = map_structure(torch.clone, batch)
        devices.copy_into(batch, self._batches[key])

        def step(*others):
            case = *key, _shapes(others)
            own = self._steps.setdefault(case, _Step(self._stream))
            return own(gradient_step, self._batches[key], *others)

        return step


class Acting:
    """An agent's act() for batches in host memory, [1, n, ...]: called with (step,
    core_state), it returns what act() does, in host memory. Of one thread alone.

    With --cuda_graphs there is a graph for 1, 2, 4, ... rows each, of which the last
    ones may be left over from another batch. Each is captured once.
    """

    def __init__(self, agent, device):
        self._agent, self._device = agent, device
        captures = agent.flags.cuda_graphs and device.type == "cuda"
        captures = captures and agent.acts_in_graphs
        self._steps = {} if captures else None  # {rows: (inputs on the GPU, _Step)}
        self._batch, self._fields = None, []  # Those of a step that act() reads.

    def __call__(self, step, core_state):
        if self._steps is None:
            step = devices.Lazy(step, lambda _, x: devices.send(x, self._device))
            with not_capturing(self._agent.flags, self._device):
                outputs = self._agent.act(step, devices.send(core_state, self._device))
            return devices.to_host(outputs, self._device)
        n = step["done"].shape[1]
        size = 1 << (n - 1).bit_length()
        self._batch = step, core_state
        if size not in self._steps:
            inputs = map_structure(lambda x: self._room(x, size), self._batch)
            stream = torch.cuda.current_stream()
            self._steps[size] = inputs, _Step(stream, math.inf)
        inputs, own = self._steps[size]
        for name in self._fields:
            map_structure(_copy_rows, step[name], inputs[0][name])
        map_structure(_copy_rows, core_state, inputs[1])
        outputs = devices.to_host(own.launch(self._act, inputs), self._device)
        return map_structure(lambda x: x[:, :n], outputs)

    def _act(self, inputs):
        step, core_state = inputs
        return self._agent.act(devices.Lazy(step, self._find), core_state)

    def _find(self, name, there):
        if name not in self._fields:  # It is sent beforehand from the next call on.
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"act() did not read {name!r} in its first calls")
            self._fields.append(name)
            map_structure(_copy_rows, self._batch[0][name], there)
        return there

    def _room(self, x, size):
        return x[:, :1].to(self._device).repeat(1, size, *[1] * (x.dim() - 2))


class _Step:
    """Calls of a function whose arguments differ in their numbers alone."""

    def __init__(self, stream, max_replays=None):
        self._stream, self._graph, self._calls = stream, None, 0
        self._replays, self._max_replays = 0, max_replays or MAX_REPLAYS

    def __call__(self, function, batch, *others):
        """Returns the function's result."""
        result = self.launch(function, batch, *others)
        if self._graph is None:
            return result
        it = iter(self._numbers.clone())  # A copy of all of them at once.
        return map_structure(lambda x: x.clone() if x.dim() else next(it), result)

    def launch(self, function, batch, *others):
        """As a call, but the next one may overwrite the result."""
        with _capturing:
            return self._launch(function, batch, *others)

    def _launch(self, function, batch, *others):
        if self._replays == self._max_replays:  # It is captured anew.
            self._graph, self._replays = None, 0
        if self._graph is None and self._calls < WARM_UP:
            self._calls += 1
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = function(batch, *others)
            current.wait_stream(self._stream)
            return result
        if self._graph is None:
            self._capture(function, batch, others)
        map_structure(_copy, others, self._others)
        self._graph.replay()
        self._replays += 1
        return self._result

    def _capture(self, function, batch, others):
        # Frees the memory of the one before.
        self._result, self._numbers = None, None
        graph, self._others = torch.cuda.CUDAGraph(), map_structure(_copy, others)
        with capturing(graph, self._stream):
            self._result = function(batch, *self._others)
            for name, x in leaves(self._result):
                if x.device.type != "cuda":
                    raise RuntimeError(f"a result on the CPU: {name}")
            numbers = [x for _, x in leaves(self._result) if x.dim() == 0]
            self._numbers = torch.stack(numbers) if numbers else torch.zeros(0)
        self._graph = graph


@contextlib.contextmanager
def capturing(graph, stream=None, remedy="--no-cuda_graphs does without them"):
    """A context whose launches, on a stream of the current device, are captured. Raises
    BadInput if they cannot be, Stop if no memory is left for them."""
    try:
        # Other threads may do as they like meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            yield
    except torch.OutOfMemoryError as e:
        raise Stop(f"no memory is left for a graph: {remedy}") from e
    except RuntimeError as e:
        while e.__context__ is not None:  # The first one says what it was.
            e = e.__context__
        at = traceback.extract_tb(e.__traceback__)[-1]
        what = f"a graph cannot have {at.filename}:{at.lineno}: {first_line(e)}"
        raise BadInput(f"{what}; {remedy}") from e


def _shapes(nest):
    return tuple(
        (path, x.shape, x.dtype) if torch.is_tensor(x) else x
        for path, x in leaves(nest)
    )


def _copy_rows(x, into):
    into[:, : x.shape[1]].copy_(x, non_blocking=True)


def _copy(x, into=None):
    if not torch.is_tensor(x):
        return x
    return x.clone() if into is None else into.copy_(x)
