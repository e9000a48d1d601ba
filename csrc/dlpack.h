// Arrays to and from Python by DLPack, the array interchange protocol:
// https://dmlc.github.io/dlpack/latest/. Hold the GIL in all of this.

#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "array.h"

namespace torchbeast {

namespace py = pybind11;

// Called for an error's message.
using LeafName = std::function<std::string()>;

namespace dlpack {

// The protocol's binary interface.
enum DeviceType : int32_t { kCpu = 1, kCudaHost = 3, kRocmHost = 11 };

[[nodiscard]] inline bool is_host(int32_t type) {
  return type == kCpu || type == kCudaHost || type == kRocmHost;
}

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // In elements. Null: contiguous.
  uint64_t byte_offset;
};

struct Managed {
  static constexpr const char* kName = "dltensor";  // Its capsule's.
  static constexpr const char* kUsedName = "used_dltensor";

  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {  // Since version 1.0.
  static constexpr const char* kName = "dltensor_versioned";
  static constexpr const char* kUsedName = "used_dltensor_versioned";

  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

// Takes the tensor out of a capsule: from now on the Array owns it.
template <typename M>
[[nodiscard]] Array take(const py::object& capsule, const LeafName& leaf) {
  auto* managed = static_cast<M*>(PyCapsule_GetPointer(capsule.ptr(), M::kName));
  if (managed == nullptr) throw py::error_already_set();
  const Tensor& tensor = managed->tensor;
  if (!is_host(tensor.device.type)) {
    throw std::invalid_argument(leaf() + " is not in host memory");
  }
  Array array;
  array.dtype = {tensor.dtype.code, tensor.dtype.bits};
  if (tensor.dtype.lanes != 1 || !array.dtype.valid()) {
    throw std::invalid_argument(
        leaf() + " has elements of " + array.dtype.name() +
        ", expected bool, an integer, float16, float32, float64 "
        "or bfloat16");
  }
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
    throw std::invalid_argument(leaf() + " has " + std::to_string(tensor.ndim) +
                                " dimensions, expected at most " +
                                std::to_string(kMaxRank));
  }
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] < 0)
      throw std::invalid_argument(leaf() + " has a negative size");
    array.shape.push_back(tensor.shape[i]);
  }
  array.strides = contiguous_strides(array.shape);
  if (tensor.strides != nullptr) {
    for (int i = 0; i < tensor.ndim; ++i) array.strides[i] = tensor.strides[i];
  }
  if (tensor.data == nullptr && array.shape.product() != 0) {
    throw std::invalid_argument(leaf() + " has elements, but no memory for them");
  }
  auto* data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  if (PyCapsule_SetName(capsule.ptr(), M::kUsedName) != 0)
    throw py::error_already_set();
  const std::shared_ptr<M> owner(managed, [](M* m) {
    if (m->deleter != nullptr) m->deleter(m);
  });
  array.data = std::shared_ptr<std::byte>(owner, data);
  return array;
}

}  // namespace dlpack

// What of PyTorch is used, if it is loaded: its own functions are several times faster
// than the methods of the protocol.
struct Torch {
  py::object Tensor;
  py::object to_dlpack;
  py::object from_dlpack;
  py::str is_cpu{"is_cpu"};
  py::str requires_grad{"requires_grad"};

  // Not isinstance(), which asks the metaclass, in Python.
  [[nodiscard]] bool is_tensor(const py::object& object) const {
    return PyObject_TypeCheck(object.ptr(),
                              reinterpret_cast<PyTypeObject*>(Tensor.ptr())) != 0;
  }

  [[nodiscard]] static bool is_true(const py::object& tensor, const py::str& name) {
    const auto value =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), name.ptr()));
    if (!value) throw py::error_already_set();
    return value.ptr() == Py_True;
  }

  // Null where torch is not installed; where it is, this imports it.
  [[nodiscard]] static const Torch* get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::unique_ptr<Torch>>
        storage;
    return storage
        .call_once_and_store_result([]() -> std::unique_ptr<Torch> {
          const auto util = py::module_::import("importlib.util");
          if (util.attr("find_spec")("torch").is_none()) return nullptr;
          const auto dlpack = py::module_::import("torch.utils.dlpack");
          return std::make_unique<Torch>(
              Torch{py::module_::import("torch").attr("Tensor"),
                    dlpack.attr("to_dlpack"), dlpack.attr("from_dlpack")});
        })
        .get_stored()
        .get();
  }
};

namespace internal {

// Throws invalid_argument if the leaf is not in host memory, or part of a graph.
[[nodiscard]] inline py::object to_capsule(const py::object& object,
                                           const LeafName& leaf) {
  const auto check_device = [&](bool on_host) {
    if (on_host) return;
    const std::string name = py::hasattr(object, "device")
                                 ? py::str(object.attr("device"))
                                 : "a device of its own";
    throw std::invalid_argument(leaf() + " is on " + name +
                                ", expected host memory: call .cpu() first");
  };
  const Torch* torch = Torch::get();
  if (torch != nullptr && torch->is_tensor(object)) {
    check_device(torch->is_true(object, torch->is_cpu));
    if (torch->is_true(object, torch->requires_grad)) {
      throw std::invalid_argument(leaf() +
                                  " requires grad, expected plain data: call .detach() "
                                  "first, or compute it under torch.no_grad()");
    }
    return torch->to_dlpack(object);
  }
  if (!py::hasattr(object, "__dlpack_device__")) {
    throw std::invalid_argument(leaf() + " is of type " +
                                Py_TYPE(object.ptr())->tp_name +
                                ", expected a torch tensor or a NumPy array");
  }
  const auto type = py::tuple(object.attr("__dlpack_device__")())[0].cast<int32_t>();
  check_device(dlpack::is_host(type));
  try {
    return object.attr("__dlpack__")();
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_BufferError)) throw;
    // NumPy hands out read-only arrays only in the newer form. Nothing writes to them.
    return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
  }
}

}  // namespace internal

// The object's elements, not copied: it lives as long as the Array, which must be
// destroyed under the GIL. Throws invalid_argument that names the leaf.
[[nodiscard]] inline Array import_array(const py::object& object,
                                        const LeafName& leaf) {
  try {
    const py::object capsule = internal::to_capsule(object, leaf);
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::ManagedVersioned::kName) != 0) {
      return dlpack::take<dlpack::ManagedVersioned>(capsule, leaf);
    }
    const Array array = dlpack::take<dlpack::Managed>(capsule, leaf);
    // The imaginary part of a conjugate: every other element, and its sign is a bit
    // that DLPack does not know. (Asked of few, as is_neg() gives the GIL away.)
    if (array.strides != contiguous_strides(array.shape) && Torch::get() != nullptr &&
        Torch::get()->is_tensor(object) && object.attr("is_neg")().ptr() == Py_True) {
      throw std::invalid_argument(
          leaf() +
          " is a negated view, expected plain data: call .resolve_neg() first");
    }
    return array;
  } catch (py::cast_error&) {
    throw std::invalid_argument(leaf() +
                                " cannot be read: its __dlpack__ is not as the "
                                "protocol says");
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_Exception)) throw;  // KeyboardInterrupt.
    throw std::invalid_argument(leaf() +
                                " cannot be read: " + std::string(py::str(e.value())));
  }
}

// A capsule of one of the two forms. Whoever takes the tensor out shares the Array's
// memory, and keeps it alive.
template <typename M = dlpack::Managed>
[[nodiscard]] py::object export_array(const Array& array) {
  struct Exported {
    Array array;
    M managed;
  };
  auto exported = std::make_unique<Exported>();
  exported->array = array;
  Array& a = exported->array;
  exported->managed = {};
  exported->managed.tensor = {a.data.get(),
                              {dlpack::kCpu, 0},
                              a.shape.rank(),
                              {a.dtype.code, a.dtype.bits, 1},
                              a.shape.data(),
                              a.strides.data(),
                              0};
  if constexpr (std::is_same_v<M, dlpack::ManagedVersioned>)
    exported->managed.major = 1;
  exported->managed.context = exported.get();
  exported->managed.deleter = [](M* m) { delete static_cast<Exported*>(m->context); };
  PyObject* capsule = PyCapsule_New(&exported->managed, M::kName, [](PyObject* c) {
    if (PyCapsule_IsValid(c, M::kName) == 0) return;  // Taken.
    auto* managed = static_cast<M*>(PyCapsule_GetPointer(c, M::kName));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  (void)exported.release();  // The capsule owns it now.
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace torchbeast
