"""CUDA graphs: gradient steps that are launched as a whole, not kernel by kernel.

    step = agent.graphs.of(gradient_step, batch)
    statistics = step(*others)

Without --cuda_graphs, step(*others) is gradient_step(batch, *others). With it, a call
is captured after the first few, and replayed in later ones: what the gradient step does
on the GPU happens again, on new numbers, and nothing of what it does in Python.
"""

import contextlib
import functools
import threading
import traceback
import warnings
from collections import Counter

import torch

from torchbeast import ranks
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import leaves, map_structure

WARM_UP = 3  # Of a thread, before one is captured: libraries get ready in them.
MAX_SHAPES = 8  # Of batches; those of more shapes come too rarely to be captured.

_capturing = threading.Lock()


def not_capturing(flags):
    """A context in which no thread captures: beside that, some versions of PyTorch draw
    no random numbers on the GPU (pytorch/pytorch#173421)."""
    return _capturing if flags.cuda_graphs else contextlib.nullcontext()


class Graphs:
    """The graphs of an agent's gradient steps. Raises BadInput if there can be none."""

    def __init__(self, flags, device, optimizer):
        self._stream, self._batches, self._steps = None, {}, {}
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
        key = gradient_step.__qualname__, _shapes(batch)
        if self._stream is None or len({*self._batches, key}) > MAX_SHAPES:
            return functools.partial(gradient_step, batch)
        if key not in self._batches:
            self._batches[key] = map_structure(_copy, batch)
        map_structure(_copy, batch, self._batches[key])

        def step(*others):
            case = *key, _shapes(others)
            own = self._steps.setdefault(case, _Step(self._stream))
            return own(gradient_step, self._batches[key], *others)

        return step


class _Step:
    """Calls of a function whose arguments differ in their numbers alone."""

    def __init__(self, stream):
        self._stream, self._graph, self._calls = stream, None, Counter()

    def __call__(self, function, batch, *others):
        self._calls[me := threading.get_ident()] += 1
        if self._graph is None and self._calls[me] <= WARM_UP:
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
        it = iter(self._numbers.clone())  # A copy of all of them at once.
        return map_structure(lambda x: x.clone() if x.dim() else next(it), self._result)

    def _capture(self, function, batch, others):
        graph, self._others = torch.cuda.CUDAGraph(), map_structure(_copy, others)
        # Other threads may do as they like meanwhile.
        options = dict(stream=self._stream, capture_error_mode="thread_local")
        try:
            with _capturing, torch.cuda.graph(graph, **options):
                self._result = function(batch, *self._others)
                numbers = [x for _, x in leaves(self._result) if x.dim() == 0]
                self._numbers = torch.stack(numbers) if numbers else torch.zeros(0)
        except RuntimeError as e:
            while e.__context__ is not None:  # The first one says what it was.
                e = e.__context__
            at = traceback.extract_tb(e.__traceback__)[-1]
            what = f"a graph cannot have {at.filename}:{at.lineno}: {first_line(e)}"
            raise BadInput(f"--cuda_graphs: {what}") from e
        self._graph = graph


def _shapes(nest):
    return tuple(
        (path, x.shape, x.dtype) if torch.is_tensor(x) else x
        for path, x in leaves(nest)
    )


def _copy(x, into=None):
    if not torch.is_tensor(x):
        return x
    return x.clone() if into is None else into.copy_(x)
