// Rollout: what the environments of one stream did in T steps.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "nest.h"
#include "wire.h"

namespace torchbeast {

namespace internal {

// The same elements as one step of time: [1, ...].
inline Array as_one_step(const Array& array) {
  Array result = array;
  result.shape = {1};
  result.strides = {0};
  for (int i = 0; i < array.shape.rank(); ++i) {
    result.shape.push_back(array.shape[i]);
    result.strides.push_back(array.strides[i]);
  }
  return result;
}

}  // namespace internal

// The T + 1 steps that E environments make together, written in place.
//
// A rollout is a dict: of the step's entries [T + 1, E, ...], step 0 being the last one
// of the rollout before; of the entries of the agent's outputs [T, E, ...], which
// belong to the steps 0 to T - 1; and core_state [., E, ...], the recurrent state
// before step 0.
class Rollout {
 public:
  Rollout(int64_t unroll_length, const Nest<ArraySpec>& step) : T_(unroll_length) {
    structure_.kind = Kind::kDict;
    structure_.keys = step.structure->keys;
    structure_.children = step.structure->children;
    for (const ArraySpec& leaf : step.leaves) {
      steps_.push_back(allocate(T_ + 1, leaf.dtype, leaf.shape));
    }
  }

  // arrays: [E, ...], as in the spec.
  void write_step(int64_t t, const std::vector<Array>& arrays) const {
    for (size_t i = 0; i < arrays.size(); ++i) {
      copy(internal::as_one_step(arrays[i]), steps_[i].narrow(0, t, 1));
    }
  }

  // The last step becomes the first one.
  void begin_next() const {
    for (const Array& array : steps_)
      copy(array.narrow(0, T_, 1), array.narrow(0, 0, 1));
  }

  // outputs: a dict of [1, E, ...].
  void write_outputs(int64_t t, const Structure& structure,
                     const std::vector<Array>& arrays) {
    if (outputs_.empty()) {
      for (size_t i = 0; i < structure.keys.size(); ++i) {
        add_entry(structure.keys[i], structure.children[i]);
      }
      for (const Array& array : arrays) {
        Dims shape = array.shape;
        shape[0] = T_;
        outputs_.push_back(allocate_array(heap_memory, array.dtype, shape));
      }
    }
    for (size_t i = 0; i < arrays.size(); ++i) {
      const Array place = i < outputs_.size() ? outputs_[i].narrow(0, t, 1) : Array();
      if (arrays.size() != outputs_.size() || arrays[i].dtype != place.dtype ||
          arrays[i].shape != place.shape) {
        throw std::invalid_argument(
            "inference returned other outputs than for the step before");
      }
      copy(arrays[i], place);
    }
  }

  // Environment e's part of it, [T + 1 or T, 1, ...]; shares memory.
  [[nodiscard]] Nest<Array> of_environment(int64_t e, const Nest<Array>& core_state) {
    if (shared_structure_ == nullptr) {
      add_entry("core_state", *core_state.structure);
      shared_structure_ = std::make_shared<const Structure>(std::move(structure_));
    }
    Nest<Array> result{shared_structure_, {}};
    const auto append = [&](const std::vector<Array>& arrays) {
      for (const Array& array : arrays) result.leaves.push_back(array.narrow(1, e, 1));
    };
    append(steps_);
    append(outputs_);
    append(core_state.leaves);
    return result;
  }

 private:
  static Array allocate(int64_t times, DType dtype, const Dims& shape) {
    Dims with_time{times};
    for (int i = 0; i < shape.rank(); ++i) with_time.push_back(shape[i]);
    return allocate_array(heap_memory, dtype, with_time);
  }

  void add_entry(const std::string& key, const Structure& child) {
    const auto& keys = structure_.keys;
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) {
      throw std::invalid_argument("the step has an entry '" + key +
                                  "', which a rollout has of the agent");
    }
    structure_.keys.push_back(key);
    structure_.children.push_back(child);
  }

  const int64_t T_;
  Structure structure_;
  std::shared_ptr<const Structure> shared_structure_;
  std::vector<Array> steps_;
  std::vector<Array> outputs_;
};

}  // namespace torchbeast
