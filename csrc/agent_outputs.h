// AgentOutputs: what the inference answered for one step.

#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "array.h"
#include "nest.h"
#include "wire.h"

namespace torchbeast {

// What the agent answered, taken apart. Throws invalid_argument if it is not
// ({"action": ..., ...}, core_state).
struct AgentOutputs {
  AgentOutputs(const Nest<Array>& result, const Nest<ArraySpec>& action_spec,
               const Structure& core_state_structure) {
    const Structure& s = *result.structure;
    if (s.kind == Kind::kLeaf || s.kind == Kind::kDict || s.children.size() != 2 ||
        s.children[0].kind != Kind::kDict) {
      throw std::invalid_argument("inference returned " + s.describe() +
                                  ", expected (dict of outputs, core_state)");
    }
    if (!(s.children[1] == core_state_structure)) {
      throw std::invalid_argument(
          "inference returned core_state as " + s.children[1].describe() +
          ", expected " + core_state_structure.describe() + ", like initial_state");
    }
    structure = s.children[0];
    const auto n = static_cast<std::ptrdiff_t>(structure.num_leaves());
    leaves.assign(result.leaves.begin(), result.leaves.begin() + n);
    core_state.assign(result.leaves.begin() + n, result.leaves.end());
    const auto [got, begin] = structure.find("action");
    if (got == nullptr) {
      throw std::invalid_argument("inference returned " + structure.describe() +
                                  ", expected 'action' among them");
    }
    std::vector<size_t> order;
    try {
      order = match(*action_spec.structure, *got);
    } catch (const std::invalid_argument& e) {
      throw std::invalid_argument(
          std::string("the agent's action is not what the server asks for: ") +
          e.what());
    }
    for (size_t i = 0; i < order.size(); ++i) {
      const Array& array = leaves.at(begin + order[i]);
      const ArraySpec& expected = action_spec.leaves.at(i);
      Array& row = action.emplace_back(array);
      row.shape = {};
      row.strides = {};
      for (int d = 1; d < array.shape.rank(); ++d) {
        row.shape.push_back(array.shape[d]);
        row.strides.push_back(array.strides[d]);
      }
      if (array.dtype != expected.dtype || row.shape != expected.shape) {
        throw std::invalid_argument(
            "inference returned the action as " + array.dtype.name() + " " +
            array.shape.str() + ", expected " + expected.dtype.name() + " [1] + " +
            expected.shape.str() + " for " + action_spec.structure->leaf_name(i));
      }
    }
  }

  Structure structure;            // The dict's.
  std::vector<Array> leaves;      // [1, E, ...]
  std::vector<Array> core_state;  // [., E, ...]
  std::vector<Array> action;      // [E, ...], in the order of the server's.
};

}  // namespace torchbeast
