// Arrays for tests.

#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "array.h"
#include "nest.h"
#include "wait.h"

namespace torchbeast {

inline constexpr DType kInt32{DType::kInt, 32};

// An int32 array of this shape whose elements are first, first + 1, ...
inline Array count_up(const Dims& shape, int32_t first = 0) {
  const Array array = allocate_array(heap_memory, kInt32, shape);
  auto* elements = reinterpret_cast<int32_t*>(array.data.get());
  for (int64_t i = 0; i < shape.product(); ++i) {
    elements[i] = first + static_cast<int32_t>(i);
  }
  return array;
}

// The elements of an int32 array of any strides, in row-major order.
inline std::vector<int32_t> elements(const Array& array) {
  const Array packed = copied(heap_memory, array);
  const auto* begin = reinterpret_cast<const int32_t*>(packed.data.get());
  return {begin, begin + array.shape.product()};
}

inline Structure leaf() { return {}; }
inline Structure dict(std::vector<std::string> keys, std::vector<Structure> children) {
  return {Kind::kDict, std::move(keys), std::move(children)};
}
inline Structure tuple(std::vector<Structure> children) {
  return {Kind::kTuple, {}, std::move(children)};
}

template <typename T>
Nest<T> make_nest(Structure structure, std::vector<T> leaves) {
  return {std::make_shared<const Structure>(std::move(structure)), std::move(leaves)};
}

inline Nest<Array> single(Array array) {
  return make_nest<Array>(leaf(), {std::move(array)});
}

// heap_memory() that counts its calls.
inline Allocate counting(std::atomic<int>* num_calls) {
  return [num_calls](size_t bytes) {
    ++*num_calls;
    return heap_memory(bytes);
  };
}

// Ends a call that waits.
struct Interrupt {};
struct Interrupting final : Blocking {
  void begin() override { began = true; }
  void poll() override {
    CHECK(began);
    throw Interrupt();
  }
  bool began = false;
};

// What a thread in Python does: releases something, and is interrupted now and then.
class Busy final : public Blocking {
 public:
  explicit Busy(uint32_t seed) : random_(seed) {}
  void begin() override { std::this_thread::yield(); }
  void poll() override {
    if (random_() % 4 == 0) throw Interrupt();
  }

 private:
  std::mt19937 random_;
};

// The message of the exception that f throws.
template <typename E, typename F>
std::string message(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

inline bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("'" << text << "' does not contain '" << part << "'");
  return found;
}

}  // namespace torchbeast
