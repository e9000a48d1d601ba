// libtorchbeast's Python side: nests, queues and batchers of torch tensors.

#include <absl/synchronization/mutex.h>
#include <cxxabi.h>
#include <grpcpp/grpcpp.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "array.h"
#include "batching_queue.h"
#include "dlpack.h"
#include "dynamic_batcher.h"
#include "listener.h"
#include "nest.h"
#include "wire.h"

namespace torchbeast {
namespace {

using PyNest = Nest<py::object>;

void flatten(py::handle object, int depth, Structure* structure,
             std::vector<py::object>* leaves) {
  if (depth > kMaxDepth) {
    throw std::invalid_argument("the nest is deeper than " + std::to_string(kMaxDepth) +
                                " levels");
  }
  if (PyTuple_Check(object.ptr()) || PyList_Check(object.ptr())) {
    structure->kind = PyTuple_Check(object.ptr()) ? Kind::kTuple : Kind::kList;
    for (const py::handle child : object) {
      flatten(child, depth + 1, &structure->children.emplace_back(), leaves);
    }
  } else if (PyDict_Check(object.ptr())) {
    structure->kind = Kind::kDict;
    for (const auto& [key, child] : py::reinterpret_borrow<py::dict>(object)) {
      if (!py::isinstance<py::str>(key)) {
        throw std::invalid_argument("nests have strings for keys, got " +
                                    std::string(py::repr(key)));
      }
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
      if (text == nullptr) {
        PyErr_Clear();
        throw std::invalid_argument("nests have text for keys, got " +
                                    std::string(py::str(py::repr(key))));
      }
      structure->keys.emplace_back(text, static_cast<size_t>(size));
      flatten(child, depth + 1, &structure->children.emplace_back(), leaves);
    }
  } else {
    leaves->push_back(py::reinterpret_borrow<py::object>(object));
  }
}

PyNest to_nest(const py::object& object) {
  auto structure = std::make_shared<Structure>();
  PyNest nest;
  flatten(object, 0, structure.get(), &nest.leaves);
  nest.structure = std::move(structure);
  return nest;
}

py::object build(const Structure& structure, const py::object** next) {
  if (structure.kind == Kind::kLeaf) return *(*next)++;
  if (structure.kind == Kind::kDict) {
    py::dict dict;
    for (size_t i = 0; i < structure.keys.size(); ++i) {
      dict[py::str(structure.keys[i])] = build(structure.children[i], next);
    }
    return dict;
  }
  py::list list;
  for (const Structure& child : structure.children) list.append(build(child, next));
  if (structure.kind == Kind::kTuple) return py::tuple(list);
  return list;
}

py::object to_python(const PyNest& nest) {
  const py::object* next = nest.leaves.data();
  return build(*nest.structure, &next);
}

Nest<Array> to_arrays(const py::object& object) {
  const PyNest nest = to_nest(object);
  Nest<Array> arrays{nest.structure, {}};
  arrays.leaves.reserve(nest.leaves.size());
  for (size_t i = 0; i < nest.leaves.size(); ++i) {
    arrays.leaves.push_back(
        import_array(nest.leaves[i], [&] { return nest.structure->leaf_name(i); }));
  }
  return arrays;
}

// Hands an Array to np.from_dlpack, which takes objects and not capsules.
struct Exporter {
  Array array;
};

py::object to_python(const Nest<Array>& nest) {
  return to_python(nest.map([](const Array& array) -> py::object {
    if (const Torch* torch = Torch::get())
      return torch->from_dlpack(export_array(array));
    return py::module_::import("numpy").attr("from_dlpack")(Exporter{array});
  }));
}

// Gives the GIL away when a call really blocks, and takes it again at its end. (Giving
// it away in every call costs more than most calls: another thread takes it at once.)
class WithoutGil final : public Blocking {
 public:
  WithoutGil() = default;
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() { end(); }

  void begin() override {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }

  void end() {
    if (state_ != nullptr) acquire();
  }

  // Runs signal handlers if this is the main thread. Throws what they raise.
  void poll() override {
    acquire();
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    state_ = PyEval_SaveThread();
  }

 private:
  void acquire() {
    // There is no GIL to be had any more: the process is about to end.
    while (is_finalizing()) std::this_thread::sleep_for(std::chrono::hours(1));
    try {
      PyEval_RestoreThread(std::exchange(state_, nullptr));
    } catch (abi::__forced_unwind&) {
      // The interpreter ended meanwhile, and Python would unwind this thread.
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

  static bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }

  PyThreadState* state_ = nullptr;
};

// PyTorch's page-locked memory, which goes to a GPU asynchronously.
std::shared_ptr<std::byte> pinned_memory(size_t bytes) {
  py::gil_scoped_acquire gil;
  const auto torch = py::module_::import("torch");
  auto tensor = std::make_unique<py::object>(torch.attr("empty")(
      bytes, py::arg("dtype") = torch.attr("uint8"), py::arg("pin_memory") = true));
  auto* data =
      reinterpret_cast<std::byte*>(tensor->attr("data_ptr")().cast<std::uintptr_t>());
  return {data, [owner = tensor.release()](std::byte*) {
            py::gil_scoped_acquire gil;
            delete owner;
          }};
}

Allocate allocator(bool pin_memory) {
  if (!pin_memory) return recycling_allocator();
  const auto has_gpu = [] {
    const auto accelerator = py::module_::import("torch").attr("accelerator");
    return accelerator.attr("is_available")().cast<bool>();
  };
  if (Torch::get() == nullptr || !has_gpu()) {
    throw std::invalid_argument("pin_memory is True, but PyTorch finds no GPU");
  }
  return recycling_allocator(pinned_memory);
}

using Queue = LearnerQueue;

// dequeue() as the next of an iteration.
template <typename F>
auto next(F dequeue) {
  try {
    return dequeue();
  } catch (const Closed&) {
    throw py::stop_iteration();
  }
}

// What a server said may be any bytes.
py::str decode(const std::string& text) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
      text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

py::object dequeue_many(Queue* queue) {
  WithoutGil without_gil;
  const Queue::Batch batch = queue->dequeue_many(&without_gil);
  without_gil.end();
  return to_python(batch.arrays);
}

py::list to_dicts(const std::vector<ActorPool::Status>& statuses) {
  py::list result;
  for (const ActorPool::Status& s : statuses) {
    result.append(py::dict(py::arg("stream") = s.stream, py::arg("address") = s.address,
                           py::arg("state") = s.state, py::arg("num_envs") = s.num_envs,
                           py::arg("steps") = s.steps, py::arg("rollouts") = s.rollouts,
                           py::arg("reconnects") = s.reconnects,
                           py::arg("failures") = s.failures,
                           py::arg("environment") = decode(s.environment),
                           py::arg("last_error") = decode(s.last_error),
                           py::arg("dialed_in") = s.dialed_in));
  }
  return result;
}

void bind_nest(py::module_ nest) {
  nest.doc() =
      "Nested tuples, lists and dicts (with strings for keys) of leaves: everything "
      "else.\n\n"
      "Results have the structure of the first nest. Where several nests are given, "
      "tuples\nmatch lists, and the order of a dict's keys does not matter; ValueError "
      "says where\nthey differ otherwise. A namedtuple comes back as a tuple.";
  nest.def(
      "map",
      [](const py::function& f, const py::object& n) {
        return to_python(to_nest(n).map(
            [&](const py::object& leaf) { return py::object(f(leaf)); }));
      },
      py::arg("f"), py::arg("nest"), "f(leaf) for each leaf.");
  nest.def(
      "map_many2",
      [](const py::function& f, const py::object& a, const py::object& b) {
        return to_python(zip<py::object>({to_nest(a), to_nest(b)})
                             .map([&](const std::vector<py::object>& leaves) {
                               return py::object(f(leaves[0], leaves[1]));
                             }));
      },
      py::arg("f"), py::arg("nest1"), py::arg("nest2"),
      "f(leaf1, leaf2) for the leaves at the same place of both.");
  const auto zip_all = [](const py::args& nests) {
    std::vector<PyNest> all;
    for (const py::handle n : nests) {
      all.push_back(to_nest(py::reinterpret_borrow<py::object>(n)));
    }
    return zip(all).map([](const std::vector<py::object>& leaves) -> py::object {
      return py::cast(leaves);
    });
  };
  nest.def(
      "map_many",
      [zip_all](const py::function& f, const py::args& nests) {
        return to_python(zip_all(nests).map(
            [&](const py::object& leaves) { return py::object(f(leaves)); }));
      },
      "f([leaf1, leaf2, ...]) for the leaves at the same place of all nests.");
  nest.def(
      "zip", [zip_all](const py::args& nests) { return to_python(zip_all(nests)); },
      "One nest, whose leaves are the lists of the nests' leaves.");
  nest.def(
      "flatten", [](const py::object& n) { return to_nest(n).leaves; }, py::arg("nest"),
      "The list of its leaves, in order.");
  nest.def(
      "pack_as",
      [](const py::object& n, const py::iterable& leaves) {
        PyNest packed = to_nest(n);
        const size_t expected = packed.leaves.size();
        packed.leaves.clear();
        for (const py::handle leaf : leaves) {
          packed.leaves.push_back(py::reinterpret_borrow<py::object>(leaf));
        }
        if (packed.leaves.size() != expected) {
          throw std::invalid_argument("got " + std::to_string(packed.leaves.size()) +
                                      " leaves, expected " + std::to_string(expected) +
                                      " for this nest");
        }
        return to_python(packed);
      },
      py::arg("nest"), py::arg("leaves"),
      "The leaves in the nest's structure: pack_as(n, flatten(n)) equals n.");
  nest.def(
      "front", [](const py::object& n) { return to_nest(n).front(); }, py::arg("nest"),
      "Its first leaf. ValueError if it has none.");
}

// Each actor waits for its own socket. By gRPC's default one of them waits for all, and
// hands on what comes: three and a half switches between threads a step instead of one.
void poll_own_sockets() {
  constexpr const char* kName = "GRPC_POLL_STRATEGY";
  if (std::getenv(kName) != nullptr) return;
  setenv(kName, "poll", 0);
  grpc_init();      // Reads it, once for the process.
  unsetenv(kName);  // Servers, which inherit it, have one thread that waits.
}

// Debian's Abseil looks for deadlocks at each lock that gRPC takes, in a graph of all
// locks that are held: an eighth of the learner's processor time with 1,000 streams.
void lock_without_a_graph() {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

PYBIND11_MODULE(_libtorchbeast, m) {
  poll_own_sockets();
  lock_without_a_graph();
  m.doc() = "The C++ part of libtorchbeast.";
  (void)Torch::get();  // Imported now: not in a thread, nor while the interpreter ends.
  bind_nest(m.def_submodule("nest"));
  py::register_exception<Closed>(m, "ClosedBatchingQueue", PyExc_RuntimeError)
      .attr("__doc__") = "A queue or batcher was closed: nothing goes in or comes out.";
  py::register_exception<AsyncError>(m, "AsyncError", PyExc_RuntimeError)
      .attr("__doc__") = "The batch that a call was part of got no outputs.";

  py::class_<Exporter>(m, "_Exporter")
      .def("__dlpack_device__", [](const Exporter&) { return py::make_tuple(1, 0); })
      .def("__dlpack__", [](const Exporter& self, const py::kwargs& kwargs) {
        const bool versioned =
            kwargs.contains("max_version") && !kwargs["max_version"].is_none();
        return versioned ? export_array<dlpack::ManagedVersioned>(self.array)
                         : export_array(self.array);
      });

  py::class_<Queue, std::shared_ptr<Queue>>(m, "BatchingQueue",
                                            R"(Nests of tensors go in, batches come out.

Any number of threads may put in and take out. An item is a nest of torch tensors or
NumPy arrays in host memory, of one or more rows along batch_dim; all arrays of an item
have the same number of rows. It is copied when enqueue() returns. A batch has the items
that wait, oldest first, as many as fit into maximum_batch_size rows; it never splits an
item. Its tensors are contiguous and stay valid after the queue is gone. Do not change or
resize an item while enqueue() has it. OrderedDicts come out as dicts, namedtuples as
tuples.

Args:
    batch_dim: the dimension along which items are joined.
    minimum_batch_size: rows that a batch waits for. It has fewer if the next item does
        not fit, if timeout_ms have passed since its first item came, or if the queue is
        closed.
    maximum_batch_size: rows. Memory is reserved for so many; larger items are refused.
    timeout_ms: milliseconds. None waits for minimum_batch_size without end.
    check_inputs: True refuses an item whose structure, dtypes or other dimensions are not
        those of the first one. False puts it into another batch.
    maximum_queue_size: items that may wait; enqueue() blocks while they do, unless they
        are too few for a batch.
    pin_memory: True gives batches in page-locked memory, for asynchronous copies to a GPU,
        and room that grows with the batches. Wait for the copies before you let a batch go:
        its memory is used again.

Blocking calls release the GIL; they end on close(), and in the main thread on Ctrl-C.

    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2)
    queue.enqueue({"x": torch.zeros(1, 3)})
    queue.enqueue({"x": torch.ones(1, 3)})
    queue.dequeue_many()  # {"x": a tensor [2, 3]}; NumPy's where torch is not installed.)")
      .def(py::init([](int batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size, std::optional<int64_t> timeout_ms,
                       bool check_inputs, std::optional<int64_t> maximum_queue_size,
                       bool pin_memory) {
             const BatchingOptions options{
                 batch_dim,    minimum_batch_size, maximum_batch_size, timeout_ms,
                 check_inputs, maximum_queue_size, pin_memory};
             return std::make_shared<Queue>(options, allocator(pin_memory));
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_inputs") = true, py::arg("maximum_queue_size") = py::none(),
           py::arg("pin_memory") = false)
      .def(
          "enqueue",
          [](Queue& self, const py::object& item) {
            const Nest<Array> arrays = to_arrays(item);
            WithoutGil without_gil;
            self.enqueue(arrays, {}, &without_gil);
          },
          py::arg("item"),
          "Blocks while the queue is full. ValueError for an item that cannot be "
          "batched,\nClosedBatchingQueue after close(): in both cases it has not gone "
          "in.")
      .def("dequeue_many", &dequeue_many,
           "Blocks until a batch is ready, and returns it: a nest of tensors.\n"
           "ClosedBatchingQueue if the queue is closed and drained; an iteration ends "
           "there.")
      .def("__iter__", [](const py::object& self) { return self; })
      .def("__next__",
           [](Queue& self) { return next([&] { return dequeue_many(&self); }); })
      .def("size", &Queue::size, "How many items wait.")
      .def(
          "close", [](Queue& self, bool discard) { self.close(discard); },
          py::arg("discard") = false,
          "Wakes everyone. Items that wait can still be dequeued, unless discard is "
          "True.\n"
          "May be called twice.")
      .def("is_closed", &Queue::is_closed);

  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>> batcher(
      m, "DynamicBatcher",
      R"(Many threads compute(), one evaluates their inputs in batches.

    batcher = DynamicBatcher(batch_dim=1)

    # Any number of threads:
    outputs = batcher.compute(inputs)

    # One or more threads:
    for batch in batcher:
        batch.set_outputs(model(batch.get_inputs()))

Inputs and outputs are nests of tensors, as in BatchingQueue, and so are the arguments;
inputs unlike the first ones are refused. With check_outputs=True, so are outputs of
another structure, dtype or row shape than the first ones. pin_memory is about inputs.

Blocking calls release the GIL; they end on close(), and in the main thread on Ctrl-C.)");
  batcher
      .def(py::init([](int batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size, std::optional<int64_t> timeout_ms,
                       bool check_outputs, bool pin_memory) {
             BatchingOptions options{batch_dim, minimum_batch_size, maximum_batch_size,
                                     timeout_ms};
             options.grow = pin_memory;
             return std::make_shared<DynamicBatcher>(options, check_outputs,
                                                     allocator(pin_memory));
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_outputs") = true, py::arg("pin_memory") = false)
      .def(
          "compute",
          [](DynamicBatcher& self, const py::object& inputs) {
            const Nest<Array> arrays = to_arrays(inputs);
            WithoutGil without_gil;
            const Nest<Array> outputs = self.compute(arrays, &without_gil);
            without_gil.end();
            return to_python(outputs);
          },
          py::arg("inputs"),
          "Blocks until the batch has outputs; returns this call's rows of them.\n"
          "ClosedBatchingQueue if the batcher is or gets closed, AsyncError if the "
          "batch "
          "was\ndropped without outputs, ValueError for inputs that cannot be batched.")
      .def("__iter__", [](const py::object& self) { return self; })
      .def(
          "__next__",
          [](DynamicBatcher& self) {
            WithoutGil without_gil;
            return next([&] { return self.get_batch(&without_gil); });
          },
          "Blocks until a batch is ready.")
      .def("size", &DynamicBatcher::size, "How many calls wait to be part of a batch.")
      .def("close", &DynamicBatcher::close,
           "Ends every compute() with ClosedBatchingQueue, and every iteration. May be "
           "called\ntwice.")
      .def("is_closed", &DynamicBatcher::is_closed);

  py::class_<DynamicBatcher::Batch>(batcher, "Batch", R"(The inputs of some callers.

If it is dropped without set_outputs(), its callers get an AsyncError. A variable, the
loop's for one, and the traceback of an exception keep it: whoever catches an error and
goes on calls set_error().)")
      .def(
          "get_inputs",
          [](const DynamicBatcher::Batch& self) {
            return to_python(self.get_inputs());
          },
          "A nest of contiguous tensors: the callers' inputs, one after the other. The "
          "same\n"
          "memory each time.")
      .def(
          "set_outputs",
          [](DynamicBatcher::Batch& self, const py::object& outputs) {
            const Nest<Array> arrays = to_arrays(outputs);
            WithoutGil without_gil;
            self.set_outputs(arrays, &without_gil);
          },
          py::arg("outputs"),
          "Copies a nest of tensors with as many rows as the inputs, and gives each "
          "caller its\nown. ValueError for another number of rows (the batch stays "
          "open), RuntimeError if\ncalled twice.")
      .def(
          "set_error", &DynamicBatcher::Batch::set_error, py::arg("message"),
          "Its callers get an AsyncError with this message. Nothing if it has outputs.")
      .def("__len__", &DynamicBatcher::Batch::size, "How many rows it has.");
  m.attr("Batch") = batcher.attr("Batch");

  py::class_<ActorPool>(m, "ActorPool",
                        R"(Steps environment servers, one stream each.

For each step it asks inference_batcher for compute((step, core_state)), nests of
[1, E, ...] for the E environments of a stream; the answer is (outputs, core_state), where
outputs is a dict with at least "action", a nest of arrays [1, E, ...] as the server wants
it. Each unroll_length T steps it puts E rollouts, one of each environment, into
learner_queue: dicts of the step's entries
[T + 1, 1, ...], of the outputs' entries [T, 1, ...], and core_state, the one before step 0.
Both must have batch_dim=1.

Args:
    unroll_length: T.
    learner_queue: a BatchingQueue.
    inference_batcher: a DynamicBatcher.
    addresses: of servers (polybeast_env.py): "host:port" or "unix:path".
    initial_state: the recurrent state of one environment, a nest of [., 1, ...].
    observation_space, action_space: as Gymnasium prints them; servers with others are
        refused. Not compared if empty.
    step: a nest of [., ...]; servers whose steps have other entries, dtypes or shapes,
        but for the rows, are refused. Not compared if None.
    seed: what the seeds of all environments are made of, with the number of their
        stream and of its connection.
    connect_timeout_s: run() raises if no server could be reached in that time.
    max_rollouts: all streams together deliver exactly so many, and then wait for
        stop(). None: without end.
    allowed_rollouts: all streams together begin so many, and then wait for allow().
        None: without end.
    tls_cert, tls_key, tls_ca: what is in the files, PEM. With them, all three, the
        learner shows tls_cert to servers and accepts those whose certificate is signed
        by tls_ca and names the host of the address. "unix:path" stays without TLS.
    listen: an address at which hosts open streams while run() lasts: at most max_streams,
        with the same tls_*. Hosts are waited for without limit. None if empty.
    welcome_timeout_s: a stream whose environments have not come by then is hung up on.
    burn_in: K. Rollouts have K + T + 1 steps, and the first K + 1 repeat the last ones
        of the rollout before; the first rollout of a stream has K + T new ones.
    one_episode: a rollout has steps of one episode only. Those after its end repeat the
        last one, with done = True and mask = False: the step has an entry "mask" more.
    max_message_bytes: that are read of a server or host: a larger message ends its
        stream.
    max_envs: environments of all streams together that hosts open; streams with more are
        refused.
        None: any number.

A stream that fails costs its unfinished rollout; the actor connects again.)")
      .def(py::init([](int64_t unroll_length, std::shared_ptr<Queue> learner_queue,
                       std::shared_ptr<DynamicBatcher> inference_batcher,
                       const std::vector<std::string>& addresses,
                       const py::object& initial_state, std::string observation_space,
                       std::string action_space, int64_t seed, double connect_timeout_s,
                       std::optional<int64_t> max_rollouts, std::string tls_cert,
                       std::string tls_key, std::string tls_ca, const py::object& step,
                       std::string listen, int64_t max_streams,
                       double welcome_timeout_s, int64_t burn_in, bool one_episode,
                       int64_t max_message_bytes, std::optional<int64_t> max_envs,
                       std::optional<int64_t> allowed_rollouts) {
             // Copied: actors are threads without the GIL.
             const Nest<Array> state = to_arrays(initial_state).map([](const Array& x) {
               return copied(heap_memory, x);
             });
             return std::make_unique<ActorPool>(
                 ActorPool::Options{
                     unroll_length, burn_in, one_episode, seed, connect_timeout_s,
                     listen.empty() ? 0 : max_streams, welcome_timeout_s,
                     max_rollouts.value_or(std::numeric_limits<int64_t>::max()),
                     allowed_rollouts.value_or(std::numeric_limits<int64_t>::max()),
                     max_message_bytes,
                     max_envs.value_or(std::numeric_limits<int64_t>::max()),
                     std::move(observation_space), std::move(action_space),
                     std::move(tls_cert), std::move(tls_key), std::move(tls_ca),
                     std::move(listen),
                     step.is_none() ? RowSpec() : RowSpec(to_arrays(step))},
                 std::move(learner_queue), std::move(inference_batcher), addresses,
                 state);
           }),
           py::arg("unroll_length"), py::arg("learner_queue"),
           py::arg("inference_batcher"), py::arg("addresses"), py::arg("initial_state"),
           py::arg("observation_space") = "", py::arg("action_space") = "",
           py::arg("seed") = 0, py::arg("connect_timeout_s") = 60,
           py::arg("max_rollouts") = py::none(), py::arg("tls_cert") = "",
           py::arg("tls_key") = "", py::arg("tls_ca") = "",
           py::arg("step") = py::none(), py::arg("listen") = "",
           py::arg("max_streams") = 1024, py::arg("welcome_timeout_s") = 300,
           py::arg("burn_in") = 0, py::arg("one_episode") = false,
           py::arg("max_message_bytes") = kMaxMessageBytes,
           py::arg("max_envs") = py::none(), py::arg("allowed_rollouts") = py::none())
      .def(
          "run",
          [](ActorPool& self) {
            try {
              WithoutGil without_gil;
              std::optional<Listener> listener;  // Ends after what it has begun.
              if (!self.options().listen.empty()) listener.emplace(&self);
              self.run(&without_gil);
            } catch (const std::runtime_error& e) {
              PyErr_SetObject(PyExc_RuntimeError, decode(e.what()).ptr());
              throw py::error_already_set();
            }
          },
          "Blocks until stop(). RuntimeError, with what each server said, if none "
          "could be\n"
          "reached; learner_queue and inference_batcher are closed then.")
      .def("stop", &ActorPool::stop, py::call_guard<py::gil_scoped_release>(),
           "Ends all streams. Close inference_batcher and learner_queue, too: actors "
           "may be\n"
           "waiting for them.")
      .def("allow", &ActorPool::allow, py::arg("num_rollouts"),
           py::call_guard<py::gil_scoped_release>(),
           "So many rollouts more may be begun. Nothing without allowed_rollouts.")
      .def("add", &ActorPool::add, py::arg("address"), "Another stream.")
      .def("remove", &ActorPool::remove, py::arg("address"),
           "Ends the streams to this address. False if there is none.")
      .def(
          "status", [](const ActorPool& self) { return to_dicts(self.status()); },
          "A dict for each stream: stream (its number), address, state, num_envs, "
          "steps,\n"
          "rollouts, reconnects, failures (of these since its last rollout, where a "
          "server\nanswered), environment (its name), last_error in the server's "
          "words, "
          "dialed_in (the\nhost opened it).")
      .def(
          "take_departed",
          [](ActorPool& self) { return to_dicts(self.take_departed()); },
          "Streams that hosts opened and that have ended since the last call, as of\n"
          "status(); last_error says why.")
      .def(
          "take_metrics",
          [](ActorPool& self) {
            py::list result;
            for (const std::string& text : self.take_metrics()) {
              result.append(py::bytes(text));
            }
            return result;
          },
          "The metrics of episodes since the last call: bytes, JSON, of each.")
      .def(
          "rollouts",
          [](const ActorPool& self) {
            const ActorPool::Rollouts r = self.rollouts();
            return py::dict(py::arg("begun") = r.begun,
                            py::arg("delivered") = r.delivered,
                            py::arg("lost") = r.lost, py::arg("ended") = r.ended);
          },
          "What became of all rollouts so far, those of removed streams included:\n"
          "begun, delivered (they went into the queue, or wait to), lost (their "
          "stream\n"
          "failed), ended (by stop(), remove() or max_rollouts). begun is the sum of\n"
          "the others and of those that are being filled.")
      .def(
          "stage_seconds",
          [](const ActorPool& self) {
            const ActorPool::StageSeconds s = self.stage_seconds();
            return py::dict(py::arg("environment_wait") = s.environment_wait,
                            py::arg("inference_queue") = s.inference_queue,
                            py::arg("inference") = s.inference,
                            py::arg("rollout_queue") = s.rollout_queue);
          },
          "Where the time of all streams went so far, in seconds.");
}

}  // namespace
}  // namespace torchbeast
