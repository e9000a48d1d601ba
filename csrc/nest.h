// Nests: tuples, lists and dicts of leaves, nested in one another.
//
// A nest is kept flat: its leaves, in order, and its structure, which nests of one kind
// share. So a step of an environment costs one vector, and two structures are mostly
// compared by their pointers.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torchbeast {

// Deeper nests are refused: nothing that an environment returns is, but a list that
// contains itself.
inline constexpr int kMaxDepth = 32;

enum class Kind : uint8_t { kLeaf = 0, kTuple = 1, kList = 2, kDict = 3 };

struct Structure {
  Kind kind = Kind::kLeaf;
  std::vector<std::string> keys;    // A dict's, in its order.
  std::vector<Structure> children;  // As many as keys, in a dict.

  bool operator==(const Structure& other) const {
    return kind == other.kind && keys == other.keys && children == other.children;
  }

  [[nodiscard]] size_t num_leaves() const {
    if (kind == Kind::kLeaf) return 1;
    size_t n = 0;
    for (const Structure& child : children) n += child.num_leaves();
    return n;
  }

  // A dict's entry, and which of this nest's leaves is its first; nullptr if there is
  // none.
  [[nodiscard]] std::pair<const Structure*, size_t> find(const std::string& key) const {
    size_t leaf = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == key) return {&children[i], leaf};
      leaf += children[i].num_leaves();
    }
    return {nullptr, leaf};
  }

  // How messages name leaf i: "leaf 'observation/0'".
  [[nodiscard]] std::string leaf_name(size_t i) const {
    if (kind == Kind::kLeaf) return "the array";
    return "leaf '" + path(i).substr(1) + "'";
  }

  // "a tuple of 2", "a dict with the keys {'a', 'b'}", "a leaf".
  [[nodiscard]] std::string describe() const {
    if (kind == Kind::kLeaf) return "a leaf";
    const std::string n = std::to_string(children.size());
    if (kind == Kind::kTuple) return "a tuple of " + n;
    if (kind == Kind::kList) return "a list of " + n;
    std::string all;
    for (const std::string& key : keys) all += (all.empty() ? "'" : ", '") + key + "'";
    return "a dict with the keys {" + all + "}";
  }

 private:
  [[nodiscard]] std::string path(size_t i) const {
    for (size_t k = 0; k < children.size(); ++k) {
      const size_t n = children[k].num_leaves();
      if (i < n) {
        return "/" + (kind == Kind::kDict ? keys[k] : std::to_string(k)) +
               children[k].path(i);
      }
      i -= n;
    }
    return "";
  }
};

namespace internal {

inline void match(const Structure& expected, const Structure& other,
                  const std::string& path, size_t begin, std::vector<size_t>* order) {
  const auto differ = [&] {
    const std::string where = path.empty() ? "" : " at '" + path.substr(1) + "'";
    throw std::invalid_argument("nests differ" + where + ": expected " +
                                expected.describe() + ", got " + other.describe());
  };
  const bool sequences =
      (expected.kind == Kind::kTuple || expected.kind == Kind::kList) &&
      (other.kind == Kind::kTuple || other.kind == Kind::kList);
  if (expected.kind != other.kind && !sequences) differ();
  if (expected.children.size() != other.children.size()) differ();
  if (expected.kind == Kind::kLeaf) order->push_back(begin);
  std::vector<size_t> offsets;  // Where other's children begin in its leaves.
  for (const Structure& child : other.children) {
    offsets.push_back(begin);
    begin += child.num_leaves();
  }
  for (size_t i = 0; i < expected.children.size(); ++i) {
    size_t j = i;
    std::string key = std::to_string(i);
    if (expected.kind == Kind::kDict) {
      key = expected.keys[i];
      if (other.keys[i] != key) {  // In another order, or not at all.
        const auto found = std::find(other.keys.begin(), other.keys.end(), key);
        if (found == other.keys.end()) differ();
        j = static_cast<size_t>(found - other.keys.begin());
      }
    }
    match(expected.children[i], other.children[j], path + "/" + key, offsets[j], order);
  }
}

}  // namespace internal

// Where in `other` each leaf of `expected` is. Tuples match lists, and a dict matches
// one with the same keys in another order. Throws invalid_argument that says where the
// two differ, if they do.
[[nodiscard]] inline std::vector<size_t> match(const Structure& expected,
                                               const Structure& other) {
  std::vector<size_t> order;
  internal::match(expected, other, "", 0, &order);
  return order;
}

template <typename T>
struct Nest {
  std::shared_ptr<const Structure> structure;
  std::vector<T> leaves;  // structure->num_leaves() of them.

  // f(leaf) for each leaf, in the same structure.
  template <typename F>
  [[nodiscard]] auto map(F f) const {
    Nest<decltype(f(leaves[0]))> result{structure, {}};
    result.leaves.reserve(leaves.size());
    for (const T& leaf : leaves) result.leaves.push_back(f(leaf));
    return result;
  }

  [[nodiscard]] const T& front() const {
    if (leaves.empty()) throw std::invalid_argument("the nest has no leaves");
    return leaves[0];
  }

  // This nest's leaves in the order of `expected`; see match().
  [[nodiscard]] std::vector<T> leaves_as(const Structure& expected) const {
    if (structure.get() == &expected || *structure == expected) return leaves;
    std::vector<T> result;
    result.reserve(leaves.size());
    for (const size_t i : match(expected, *structure)) result.push_back(leaves[i]);
    return result;
  }
};

// One nest whose leaves are lists of the nests' leaves.
template <typename T>
[[nodiscard]] Nest<std::vector<T>> zip(const std::vector<Nest<T>>& nests) {
  if (nests.empty())
    throw std::invalid_argument("expected at least one nest, got none");
  Nest<std::vector<T>> result{nests[0].structure, {}};
  result.leaves.resize(nests[0].leaves.size());
  for (const Nest<T>& nest : nests) {
    std::vector<T> leaves = nest.leaves_as(*result.structure);
    for (size_t i = 0; i < leaves.size(); ++i) {
      result.leaves[i].push_back(std::move(leaves[i]));
    }
  }
  return result;
}

}  // namespace torchbeast
