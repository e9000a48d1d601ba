"""GPUs that are not there: tensors that say that they are on one, and keep their
numbers in host memory.

    with PretendedGpus() as gpus:
        torch.ones(2, device="cuda").sum().item()
    gpus.launches, gpus.waits  # 2, {"item at tests/x.py:7": 1}

Refused are operations on tensors of several devices, reads of what a copy or another
stream may not have written yet, and launches and waits that a CUDA graph cannot
capture. Counted are launches of kernels, about as many as PyTorch's operations, and
waits of the CPU.

What is refused here fails on a GPU, or reads what it should not. What is accepted may
still fail there: numbers are the CPU's, memory is never short, and what overwrites
memory that others still read is not noticed. A stream works when somebody waits for it:
until then none of its events has passed.

PyTorch's C++ takes the tensors for such without memory ("meta"), so that a few of its
operations choose another way. The pretence is of the thread that enters it.
"""

import contextlib
import os
import sys
from collections import Counter
from unittest import mock

import torch
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOST = torch.device("cpu")
# They look at numbers to know the shape or the way of their result, or to check them.
WAITS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "multinomial",
    "bincount", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "_unsafe_view", "_reshape_alias",
}  # fmt: skip


class GpuTensor(torch.Tensor):
    """x: a tensor in host memory with the numbers. index: of the GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, x, index):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            x.shape,
            strides=x.stride(),
            storage_offset=x.storage_offset(),
            dtype=x.dtype,
            device="meta",
        )

    def __init__(self, x, index):
        self.x, self.index = x, index

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda, is_meta, is_cpu = True, False, False

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return PretendedGpus.current.run(function, args, kwargs or {})

    def to(self, *args, copy=False, **kwargs):
        device, dtype, _, order = torch._C._nn._parse_to(*args, **kwargs)
        same = device is None or PretendedGpus.current.index(device) == self.index
        same = same and (order is None or self.is_contiguous(memory_format=order))
        if same and not copy and dtype in (None, self.dtype):
            return self
        return super().to(*args, copy=copy, **kwargs)

    def numpy(self, **kwargs):
        raise TypeError("a tensor on a GPU has no NumPy array: call .cpu() first")

    __array__ = numpy

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream):
        pass

    def is_pinned(self, device=None):
        return False

    def __deepcopy__(self, memo):
        with torch.no_grad():
            copy = self.detach().clone().requires_grad_(self.requires_grad)
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol):
        return self.detach().cpu().__reduce_ex__(protocol)


TYPES = [GpuTensor, torch.Tensor, torch.nn.Parameter]  # That optimizers group.


class Stream:
    """What was launched, by number; and of other streams, up to which number what this
    one launches next comes after it."""

    def __init__(self, device=None, priority=0):
        self.gpus = PretendedGpus.current
        self.device = torch.device("cuda", self.gpus.index(device))
        self.last, self.seen = 0, Counter()

    def synchronize(self):
        self.record_event().synchronize()

    def record_event(self, event=None):
        event = event or Event()
        event.seen = self.seen | Counter({self: self.last})
        return event

    def wait_event(self, event):
        self.seen |= event.seen

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, blocking=False):
        self.gpus, self.seen = PretendedGpus.current, Counter()

    def synchronize(self):
        self.gpus.wait("an event", self.seen)

    def query(self):
        return self.seen <= self.gpus.seen


class Graph:
    """Capturing launches, too, in place of the first replay."""

    def __init__(self):
        self.launched, self.is_new = [], True
        self.read, self.written = set(), set()  # Addresses.

    @torch.inference_mode()  # In which some of it was captured.
    def replay(self):
        gpus = PretendedGpus.current
        gpus.launch("replay", self.read - self.written, self.written)
        if not self.is_new:
            for function, args, kwargs, results in self.launched:
                again = function(*args, **kwargs)
                for x, y in zip(tensors_of(results), tensors_of(again)):
                    if address(x) != address(y):
                        x.copy_(y)
        self.is_new = False


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return PretendedGpus.current.run(function, args, kwargs or {})


class PretendedGpus:
    """A context in which there are `num` GPUs.

    launches: of kernels, copies and graphs, so far
    waits:    {what and where: how often} of the CPU, so far
    """

    current = None

    def __init__(self, num=1):
        self.num, self.mode = num, Mode()
        self.launches, self.waits = 0, Counter()
        self.seen = Counter()  # {stream: the last launch that the CPU has waited for}
        self.written = {}  # {address: (stream, launch)}
        self.arriving = {}  # {address in host memory: (stream, launch, tensor)}
        self.pinned = {}  # {address: tensor}
        self.graph = None  # What captures.
        self.device_index = 0

    def __enter__(self):
        PretendedGpus.current = self
        self.streams = [Stream(i) for i in range(self.num)]  # Current ones.
        cuda, host = torch.cuda, torch.Tensor
        patches = {
            cuda: dict(
                is_available=lambda: True,
                _lazy_init=lambda: None,
                is_bf16_supported=lambda: True,
                device_count=lambda: self.num,
                current_device=lambda: self.device_index,
                set_device=self.set_device,
                current_stream=lambda device=None: self.streams[self.index(device)],
                synchronize=lambda device=None: self.wait("synchronize", self.all()),
                Stream=Stream,
                Event=Event,
                stream=self.stream,
                CUDAGraph=Graph,
                graph=self.capture,
                is_current_stream_capturing=lambda: self.graph is not None,
                mem_get_info=lambda device: (2**40, 2**40),
                get_device_name=lambda device=None: "pretended",
            ),
            torch: dict(tensor=made(torch.tensor), as_tensor=made(torch.as_tensor)),
            host: dict(
                tolist=self.reading(host.tolist),
                numpy=self.reading(host.numpy),
                is_pinned=lambda x, device=None: address(x) in self.pinned,
                pin_memory=lambda x, device=None: self.pin(x.clone()),
            ),
            torch.nn.utils.clip_grad: dict(
                _group_tensors_by_device_and_dtype=grouped,
            ),
            _foreach_utils: dict(_foreach_supported_types=TYPES),
            sys.modules["torch.optim.optimizer"]: dict(_foreach_supported_types=TYPES),
        }
        self.context = contextlib.ExitStack()
        for module, values in patches.items():
            self.context.enter_context(mock.patch.multiple(module, **values))
        self.context.enter_context(self.mode)
        return self

    def __exit__(self, *error):
        self.context.close()

    # What programs ask of torch.cuda.

    def index(self, device):
        """The number of a GPU; None for the CPU."""
        if device is None:
            return self.device_index
        if isinstance(device, int):
            return device
        device = torch.device(device)
        if device.type == "cpu":
            return None
        index = self.device_index if device.index is None else device.index
        if index >= self.num:
            raise RuntimeError(f"{device}: there are {self.num} GPUs")
        return index

    def set_device(self, device):
        if torch.device(device).index is None:
            raise ValueError(f"{device}: expected a device with a number")
        self.device_index = self.index(device)

    @contextlib.contextmanager
    def stream(self, stream):
        i, before = self.index(stream.device), self.device_index
        self.streams[i], outer = stream, self.streams[i]
        self.device_index = i
        try:
            yield
        finally:
            self.streams[i], self.device_index = outer, before

    @contextlib.contextmanager
    def capture(self, graph, stream=None, capture_error_mode="global"):
        self.wait("synchronize", self.all())
        self.graph = graph
        try:
            with self.stream(stream or Stream()):
                yield
        finally:
            self.graph = None

    def all(self):
        """Of each stream, the last launch."""
        seen = Counter()
        for stream, launch in self.written.values():
            seen[stream] = max(seen[stream], launch)
        return seen

    # What happens.

    def wait(self, what, seen):
        if self.graph is not None:
            raise RuntimeError(f"a graph cannot wait: {what} at {where()}")
        self.waits[f"{what} at {where()}"] += 1
        self.seen |= seen
        self.arriving = {
            at: (stream, launch, x)
            for at, (stream, launch, x) in self.arriving.items()
            if launch > self.seen[stream]
        }

    def launch(self, what, read, written=(), index=None):
        """read, written: addresses"""
        index = self.device_index if index is None else index
        stream = self.streams[index]
        stream.seen |= self.seen
        for at in read:
            other, launch = self.written.get(at, (stream, 0))
            if other is not stream and launch > stream.seen[other]:
                raise RuntimeError(
                    f"{what} reads what another stream may not have written: {where()}"
                )
        if self.graph is not None:
            if index != self.device_index:
                raise RuntimeError(
                    f"{what} on cuda:{index} is in no graph, which captures "
                    f"cuda:{self.device_index}: {where()}"
                )
            self.graph.read.update(read)
            self.graph.written.update(written)
        else:
            self.launches += 1
        stream.last += 1
        for at in written:
            self.written[at] = stream, stream.last
        return stream

    def read_on_host(self, what, xs):
        for x in xs:
            if self.arriving and address(x) in self.arriving:
                raise RuntimeError(f"{what} reads what has not arrived yet: {where()}")

    def pin(self, x):
        self.pinned[address(x)] = x
        return x

    def reading(self, method):
        def read(x, *args, **kwargs):
            self.read_on_host(method.__name__, [x])
            return method(x, *args, **kwargs)

        return read

    # Operations.

    def run(self, function, args, kwargs):
        name = function._schema.name.split("::")[1]
        xs = tensors_of((args, kwargs))
        on_gpu = [x for x in xs if isinstance(x, GpuTensor)]
        on_host = [x for x in xs if not isinstance(x, GpuTensor)]
        to = self.target(kwargs.get("device"), on_gpu)
        if on_gpu or to is not None:
            key = "CompositeImplicitAutograd"
            if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key):
                with self.mode:
                    return function.decompose(*args, **kwargs)
        if name in ("_to_copy", "copy_") and (on_gpu or to is not None):
            return self.copy(name, args, kwargs, to)
        is_view = any(r.alias_info and not r.alias_info.is_write
                      for r in function._schema.returns)  # fmt: skip
        if not on_gpu and to is None:
            if not is_view:
                self.read_on_host(name, on_host)
            pin = kwargs.pop("pin_memory", False)
            result = function(*args, **kwargs)
            return self.pin(result) if pin else result
        self.check_devices(function, name, args, on_gpu, on_host)
        index = max(on_gpu, key=torch.Tensor.dim).index if to is None else to
        if name == "_foreach_copy_":
            self.check_copies(*args[:2])
        if name in WAITS:
            self.wait(name, self.streams[index].record_event().seen)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": HOST}
        args, kwargs = tree_map(lambda x: getattr(x, "x", x), (args, kwargs))
        read = {address(x.x) for x in on_gpu if x.index == index}
        launches = not (is_view or name in NO_KERNEL)
        if launches:
            stream = self.launch(name, read, index=index)
        result = function(*args, **kwargs)
        if launches:
            written = {address(x) for x in tensors_of(result)} - read
            written |= {address(x) for x in written_by(function, args, kwargs)}
            self.written.update(dict.fromkeys(written, (stream, stream.last)))
            if self.graph is not None:
                self.graph.written |= written
                self.graph.launched.append((function, args, kwargs, result))
        own = {id(x.x): x for x in on_gpu}

        def wrap(x):
            if not isinstance(x, torch.Tensor):
                return x
            return own[id(x)] if id(x) in own else gpu_tensor(x, index)

        return tree_map(wrap, result)

    def target(self, device, on_gpu):
        """The number of the GPU that an operation's result is to be on by its argument
        `device`; None without such an argument."""
        if device is None:
            return None
        if torch.device(device).type == "meta":  # That of a tensor, as C++ sees it.
            return on_gpu[0].index if on_gpu else self.device_index
        return self.index(device)

    def check_devices(self, function, name, args, on_gpu, on_host):
        if name in INDEXING:
            if not isinstance(args[0], GpuTensor):
                raise RuntimeError(f"{name} of what is on the CPU: {where()}")
            value = args[2] if len(args) > 2 else None
            fills = value is not None and value.numel() == 1
            for x in args[1]:
                if x is not None and not isinstance(x, GpuTensor):
                    self.wait(f"{name} by what is on the CPU", Counter())
                elif x is not None and x.dtype == torch.bool:
                    if not fills or isinstance(value, GpuTensor):
                        self.wait(f"{name} by a mask", self.all())
            on_host = [] if value is None or fills else on_host
        numbers = torch.Tag.pointwise in function.tags or name.startswith("_foreach")
        if any(x.dim() > 0 or not numbers for x in on_host if name not in INDEXING):
            found = {str(x.device) for x in (*on_gpu, *on_host)}
            raise RuntimeError(f"{name} of tensors on {sorted(found)}: {where()}")
        # (C++ makes tensors of numbers on the GPU that it takes to be the only one.)
        if len({x.index for x in on_gpu if x.dim() > 0 or not numbers}) > 1:
            raise RuntimeError(f"{name} of tensors on several GPUs: {where()}")

    def check_copies(self, into, xs):
        """Refuses what CUDA has no kernel for, and counts a launch each where strides
        differ."""
        for x in xs:
            if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
                raise RuntimeError(f"_foreach_copy_ of {x.dtype}: {where()}")
        if any(x.stride() != y.stride() for x, y in zip(xs, into)):
            self.launches += len(xs) - 1 if self.graph is None else 0

    def copy(self, name, args, kwargs, to):
        """Copies between devices, and of other dtypes."""
        if name == "copy_":
            into, source = args[:2]
            to = into.index if isinstance(into, GpuTensor) else None
            asynchronous = len(args) > 2 and args[2]
        else:
            into, source = None, args[0]
            if kwargs.get("device") is None:
                to = source.index
            asynchronous = kwargs.get("non_blocking", False)
        of = source.index if isinstance(source, GpuTensor) else None
        x = source if of is None else source.x
        if of is None:
            self.read_on_host(name, [source])
        pinned = address(x if of is None else x) in self.pinned
        index = of if to is None else to
        read = [] if of is None else [address(x)]
        self.launch(name, read, index=index if of is None else of)
        if None not in (of, to) and of != to:  # The other GPU's stream waits for it.
            self.streams[to].wait_stream(self.streams[of])
        stream = self.streams[index if of is None else of]
        if into is not None:
            result = into.x if to is not None else into
            result.copy_(x)
        else:
            names = "dtype", "memory_format"
            kept = {k: kwargs[k] for k in names if kwargs.get(k) is not None}
            result = torch.ops.aten._to_copy(x, **kept)
        if to is not None:
            self.written[address(result)] = stream, stream.last
        if self.graph is not None:
            self.graph.written.add(address(result))
            copy_ = torch.ops.aten.copy_.default
            self.graph.launched.append((copy_, (result, x), {}, result))
        if of is None and not (asynchronous and pinned):
            self.wait("a copy to the GPU", stream.record_event().seen)
        if to is None:
            if asynchronous and (into is None or address(into) in self.pinned):
                self.arriving[address(result)] = stream, stream.last, result
                self.pinned[address(result)] = result
            else:
                self.wait("a copy to the CPU", stream.record_event().seen)
        if into is not None:
            return into
        return result if to is None else gpu_tensor(result, to)


def gpu_tensor(x, index):
    with torch.inference_mode(x.is_inference()):
        return GpuTensor(x, index)


def tensors_of(nest):
    return [x for x in tree_flatten(nest)[0] if isinstance(x, torch.Tensor)]


def address(x):
    return x.untyped_storage().data_ptr()


def written_by(function, args, kwargs):
    """The tensors among an operation's arguments that it writes to."""
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            x = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from tensors_of(x)


def made(function):
    """torch.tensor() and torch.as_tensor(), which the mode does not see."""

    def make(data, *args, device=None, **kwargs):
        x = function(data, *args, **kwargs)
        return x if device is None else x.to(device)

    return make


def grouped(lists, with_indices=False):
    """As PyTorch's own, which would call the device of GpuTensors meta."""
    groups = torch._C._group_tensors_by_device_and_dtype(lists, with_indices)
    return {(x[0][0][0].device, dtype): x for (_, dtype), x in groups.items()}


def where():
    """The line of this project that called, outside of this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and name != __file__ and "site-packages" not in name:
            return f"{os.path.relpath(name, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
