// Rollout: what the environments of one stream did in T steps.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
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
  return {array.dtype, array.shape.behind(1), array.strides.behind(0), array.data};
}

}  // namespace internal

// Environments [begin, begin + num) of a stream.
struct Columns {
  int64_t begin;
  int64_t num;
};

// The T + 1 steps that E environments make, written in place: all together, or some
// columns at a time.
//
// A rollout is a dict: of the step's entries [T + 1, E, ...], of which the first
// `overlap` repeat the last ones of the rollout before; with masked, of "mask"
// [T + 1, E], false where steps are padding; of the entries of the agent's outputs [T,
// E, ...], which belong to the steps 0 to T - 1; and core_state [., E, ...], the
// recurrent state before step 0.
class Rollout {
 public:
  Rollout(int64_t num_actions, const Nest<ArraySpec>& step, int64_t overlap = 1,
          bool masked = false)
      : T_(num_actions), overlap_(overlap), masked_(masked) {
    structure_.kind = Kind::kDict;
    structure_.keys = step.structure->keys;
    structure_.children = step.structure->children;
    for (const ArraySpec& leaf : step.leaves) {
      const Dims shape = leaf.shape.behind(T_ + 1);
      steps_.push_back(allocate_array(heap_memory, leaf.dtype, shape));
    }
    if (masked) {
      const Dims shape{T_ + 1, entry("done").shape[1]};
      add_entry("mask", Structure{Kind::kLeaf, {}, {}});
      steps_.push_back(allocate_array(heap_memory, {DType::kBool, 8}, shape));
    }
  }

  // arrays: [E, ...], as in the spec.
  void write_step(int64_t t, const std::vector<Array>& arrays, Columns columns) const {
    for (size_t i = 0; i < arrays.size(); ++i) {
      const Array step = arrays[i].narrow(0, columns.begin, columns.num);
      copy(internal::as_one_step(step), place(steps_[i], t, columns));
    }
    if (masked_) fill(place(steps_.back(), t, columns), 1);
  }

  // Repeats step t to the end. Nothing leads there: `done` is true, and the mask false.
  void pad(int64_t t, Columns columns) const {
    for (int64_t to = t + 1; to <= T_; ++to) {
      for (const Array& array : steps_) {
        copy(place(array, t, columns), place(array, to, columns));
      }
      for (const char* name : {"reward", "terminated", "truncated", "episode_end"}) {
        fill(place(entry(name), to, columns), 0);
      }
      fill(place(entry("done"), to, columns), 1);
      fill(place(steps_.back(), to, columns), 0);
      for (const Array& array : outputs_) {
        copy(place(array, t - 1, columns), place(array, to - 1, columns));
      }
    }
  }

  // The last steps become the first ones.
  void begin_next(Columns columns) const {
    const auto move = [&](const std::vector<Array>& arrays, int64_t num) {
      for (const Array& array : arrays) {
        const int64_t begin = array.shape[0] - num;
        for (int64_t t = 0; t < num; ++t) {  // One by one, as they may overlap.
          copy(place(array, begin + t, columns), place(array, t, columns));
        }
      }
    };
    move(steps_, overlap_);
    move(outputs_, overlap_ - 1);
  }

  // Whether an episode begins with the step [E, ...] of one environment.
  [[nodiscard]] bool is_first(int64_t t, int64_t e) const {
    return is_true("done", t, e);
  }

  // Whether an episode ended with it.
  [[nodiscard]] bool is_last(int64_t t, int64_t e) const {
    return is_true("terminated", t, e) || is_true("truncated", t, e);
  }

  // outputs: a dict of [1, E, ...].
  void write_outputs(int64_t t, const Structure& structure,
                     const std::vector<Array>& arrays, Columns columns) {
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
      const Array place =
          i < outputs_.size() ? Rollout::place(outputs_[i], t, columns) : Array();
      const Array part = arrays[i].narrow(1, columns.begin, columns.num);
      if (arrays.size() != outputs_.size() || part.dtype != place.dtype ||
          part.shape != place.shape) {
        throw std::invalid_argument(
            "inference returned other outputs than for the step before");
      }
      copy(part, place);
    }
  }

  // Environment e's part of it, [T + 1 or T, 1, ...]; shares memory. core_state: its,
  // [., 1, ...].
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
    for (const Array& array : core_state.leaves) result.leaves.push_back(array);
    return result;
  }

 private:
  [[nodiscard]] static Array place(const Array& array, int64_t t, Columns columns) {
    return array.narrow(0, t, 1).narrow(1, columns.begin, columns.num);
  }

  [[nodiscard]] bool is_true(const char* name, int64_t t, int64_t e) const {
    return place(entry(name), t, {e, 1}).data.get()[0] != std::byte{0};
  }

  // array: [1, num], of one element a row.
  static void fill(const Array& array, int value) {
    const auto item = array.dtype.bytes();
    for (int64_t e = 0; e < array.shape[1]; ++e) {
      std::byte* at =
          array.data.get() + e * array.strides[1] * static_cast<int64_t>(item);
      std::memset(at, value, item);
    }
  }

  // An entry [T + 1, E] of the step.
  [[nodiscard]] const Array& entry(const std::string& key) const {
    const Structure& all = shared_structure_ ? *shared_structure_ : structure_;
    const auto [child, leaf] = all.find(key);
    if (child != nullptr && leaf < steps_.size() && steps_[leaf].shape.rank() == 2) {
      return steps_[leaf];
    }
    throw std::invalid_argument("the step has no entry '" + key +
                                "' of one number for each environment");
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
  const int64_t overlap_;
  const bool masked_;
  Structure structure_;
  std::shared_ptr<const Structure> shared_structure_;
  std::vector<Array> steps_;  // The mask is the last one.
  std::vector<Array> outputs_;
};

}  // namespace torchbeast
