// N-dimensional arrays in host memory, and the memory they are recycled from.
//
// Arrays cross to Python by DLPack (dlpack.h), so nothing here knows of PyTorch.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchbeast {

// An element type, by the codes of DLPack.
struct DType {
  enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
  uint8_t code = kFloat;
  uint8_t bits = 32;

  bool operator==(const DType& o) const { return code == o.code && bits == o.bits; }
  bool operator!=(const DType& o) const { return !(*this == o); }

  [[nodiscard]] size_t bytes() const { return bits / 8; }

  [[nodiscard]] bool valid() const {
    switch (code) {
      case kInt:
      case kUInt:
        return bits == 8 || bits == 16 || bits == 32 || bits == 64;
      case kFloat:
        return bits == 16 || bits == 32 || bits == 64;
      case kBfloat:
        return bits == 16;
      case kBool:
        return bits == 8;
      default:
        return false;
    }
  }

  [[nodiscard]] std::string name() const {
    switch (code) {
      case kInt:
        return "int" + std::to_string(bits);
      case kUInt:
        return "uint" + std::to_string(bits);
      case kFloat:
        return "float" + std::to_string(bits);
      case kBfloat:
        return "bfloat" + std::to_string(bits);
      case kBool:
        return "bool";
      case 5:
        return "complex" + std::to_string(bits);
      default:
        return "type " + std::to_string(code) + " of " + std::to_string(bits) + " bits";
    }
  }
};

inline constexpr int kMaxRank = 8;

// Sizes (or strides, in elements) of at most kMaxRank dimensions. No heap.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> values) {
    for (const int64_t value : values) push_back(value);
  }

  void push_back(int64_t value) {
    if (rank_ == kMaxRank) {
      throw std::invalid_argument("arrays have at most " + std::to_string(kMaxRank) +
                                  " dimensions");
    }
    values_[static_cast<size_t>(rank_++)] = value;
  }

  [[nodiscard]] int rank() const { return rank_; }
  int64_t& operator[](int i) { return values_[static_cast<size_t>(i)]; }
  int64_t operator[](int i) const { return values_[static_cast<size_t>(i)]; }
  int64_t* data() { return values_.data(); }

  bool operator==(const Dims& o) const {
    return rank_ == o.rank_ &&
           std::equal(values_.begin(), values_.begin() + rank_, o.values_.begin());
  }
  bool operator!=(const Dims& o) const { return !(*this == o); }

  // These dimensions behind one more.
  [[nodiscard]] Dims behind(int64_t value) const {
    Dims result{value};
    for (int i = 0; i < rank_; ++i) result.push_back((*this)[i]);
    return result;
  }

  // How many elements [begin, end) of these dimensions have.
  [[nodiscard]] int64_t product(int begin, int end) const {
    int64_t n = 1;
    for (int i = begin; i < end; ++i) n *= (*this)[i];
    return n;
  }
  [[nodiscard]] int64_t product() const { return product(0, rank_); }

  // "[20, -1, 84]"
  [[nodiscard]] std::string str() const {
    std::string s = "[";
    for (int i = 0; i < rank_; ++i) s += (i ? ", " : "") + std::to_string((*this)[i]);
    return s + "]";
  }

 private:
  std::array<int64_t, kMaxRank> values_{};
  int rank_ = 0;
};

[[nodiscard]] inline Dims contiguous_strides(const Dims& shape) {
  Dims strides = shape;
  int64_t stride = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

// Elements of one type in host memory. Copying an Array copies no elements: both share
// them. The memory lives as long as any Array into it.
struct Array {
  DType dtype;
  Dims shape;
  Dims strides;  // In elements.
  std::shared_ptr<std::byte> data;

  // Rows [begin, begin + n) along dimension dim.
  [[nodiscard]] Array narrow(int dim, int64_t begin, int64_t n) const {
    Array result = *this;
    result.shape[dim] = n;
    const int64_t offset = begin * strides[dim] * static_cast<int64_t>(dtype.bytes());
    result.data = std::shared_ptr<std::byte>(data, data.get() + offset);
    return result;
  }
};

namespace internal {

// Elements of `size` bytes one by one. A constant size is a move, not a call.
template <size_t kSize>
void copy_elements(const std::byte* from, std::byte* to, int64_t n, int64_t from_step,
                   int64_t to_step) noexcept {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + i * to_step, from + i * from_step, kSize);
  }
}

}  // namespace internal

// Writes every element of `from` to its place in `to`. Same dtype, same shape, any
// strides; no overlap.
inline void copy(const Array& from, const Array& to) noexcept {
  if (from.shape.product() == 0) return;
  const auto item = static_cast<int64_t>(from.dtype.bytes());
  // The last dimensions that are contiguous in both are one run.
  int outer = from.shape.rank();
  int64_t run = 1;
  while (outer > 0 && (from.shape[outer - 1] == 1 || (from.strides[outer - 1] == run &&
                                                      to.strides[outer - 1] == run))) {
    run *= from.shape[--outer];
  }
  // Where nothing is, elements go one by one along the last dimension.
  int64_t n = 1;
  int64_t from_step = 0;
  int64_t to_step = 0;
  if (run == 1 && outer > 0) {
    --outer;
    n = from.shape[outer];
    from_step = from.strides[outer] * item;
    to_step = to.strides[outer] * item;
  }

  Dims index;
  for (int i = 0; i < outer; ++i) index.push_back(0);
  const std::byte* source = from.data.get();
  std::byte* target = to.data.get();
  for (;;) {
    if (n == 1) {
      std::memcpy(target, source, static_cast<size_t>(run * item));
    } else if (item == 1) {
      internal::copy_elements<1>(source, target, n, from_step, to_step);
    } else if (item == 2) {
      internal::copy_elements<2>(source, target, n, from_step, to_step);
    } else if (item == 4) {
      internal::copy_elements<4>(source, target, n, from_step, to_step);
    } else {
      internal::copy_elements<8>(source, target, n, from_step, to_step);
    }
    int dim = outer - 1;
    for (; dim >= 0; --dim) {
      source += from.strides[dim] * item;
      target += to.strides[dim] * item;
      if (++index[dim] < from.shape[dim]) break;
      source -= index[dim] * from.strides[dim] * item;
      target -= index[dim] * to.strides[dim] * item;
      index[dim] = 0;
    }
    if (dim < 0) return;
  }
}

// Memory of at least `bytes`; what it was given out for decides when it comes back.
using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;

constexpr size_t kAlignment = 64;  // A cache line, and AVX-512's vectors.

// Memory for one array, which goes back to the system. Throws bad_alloc.
[[nodiscard]] inline std::shared_ptr<std::byte> heap_memory(size_t bytes) {
  if (bytes > std::numeric_limits<size_t>::max() / 4) throw std::bad_alloc();
  const size_t size = (bytes / kAlignment + 1) * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* b) { std::free(b); }};
}

// Recycles memory: what is given back is given out again, so that a running queue takes
// nothing new from its source, and touches no page for the first time. Sizes are powers
// of two; of each it holds as much as was ever out at once.
//
//   allocate()  any thread; never blocks for long. Throws bad_alloc.
//
// Memory that is still out when the pool's owner goes keeps the pool alive.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(Allocate source = heap_memory) : source_(std::move(source)) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  [[nodiscard]] std::shared_ptr<std::byte> allocate(size_t bytes) {
    if (bytes > std::numeric_limits<size_t>::max() / 4) throw std::bad_alloc();
    size_t size = kAlignment;
    while (size < bytes) size *= 2;
    std::shared_ptr<std::byte> buffer;
    {
      std::lock_guard<std::mutex> lock(mu_);
      std::vector<std::shared_ptr<std::byte>>& free = free_[size];
      if (!free.empty()) {
        buffer = std::move(free.back());
        free.pop_back();
      } else {
        free.reserve(++num_of_size_[size]);  // So that giving back cannot throw.
      }
    }
    if (buffer == nullptr) buffer = source_(size);
    std::byte* data = buffer.get();
    return {data, [pool = shared_from_this(), size, buffer](std::byte*) noexcept {
              std::lock_guard<std::mutex> lock(pool->mu_);
              pool->free_[size].push_back(buffer);
            }};
  }

 private:
  const Allocate source_;
  std::mutex mu_;
  // Guarded by mu_.
  std::unordered_map<size_t, std::vector<std::shared_ptr<std::byte>>> free_;
  std::unordered_map<size_t, size_t> num_of_size_;  // Guarded by mu_.
};

[[nodiscard]] inline Allocate recycling_allocator(Allocate source = heap_memory) {
  return [pool = std::make_shared<BufferPool>(std::move(source))](size_t n) {
    return pool->allocate(n);
  };
}

// The bytes of an array. Throws bad_alloc for sizes beyond all bounds.
[[nodiscard]] inline size_t num_bytes(DType dtype, const Dims& shape) {
  auto bytes = static_cast<int64_t>(dtype.bytes());
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] == 0) return 0;
  }
  for (int i = 0; i < shape.rank(); ++i) {
    if (__builtin_mul_overflow(bytes, shape[i], &bytes)) throw std::bad_alloc();
  }
  return static_cast<size_t>(bytes);
}

// Throws bad_alloc, also for sizes beyond all bounds.
[[nodiscard]] inline Array allocate_array(const Allocate& allocate, DType dtype,
                                          const Dims& shape) {
  return {dtype, shape, contiguous_strides(shape), allocate(num_bytes(dtype, shape))};
}

// A contiguous copy. Throws bad_alloc.
[[nodiscard]] inline Array copied(const Allocate& allocate, const Array& array) {
  const Array result = allocate_array(allocate, array.dtype, array.shape);
  copy(array, result);
  return result;
}

// Arrays that lie in one piece of memory, one after the other. It lives as long as any
// of them. Throws bad_alloc.
[[nodiscard]] inline std::vector<Array> allocate_arrays(
    const Allocate& allocate, const std::vector<std::pair<DType, Dims>>& specs) {
  std::vector<size_t> begins;
  size_t total = 0;
  for (const auto& [dtype, shape] : specs) {
    begins.push_back(total);
    const size_t bytes = num_bytes(dtype, shape);
    if (bytes > std::numeric_limits<size_t>::max() / 4 - total) throw std::bad_alloc();
    total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  const std::shared_ptr<std::byte> memory = allocate(total);
  std::vector<Array> arrays;
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto& [dtype, shape] = specs[i];
    arrays.push_back({dtype, shape, contiguous_strides(shape),
                      std::shared_ptr<std::byte>(memory, memory.get() + begins[i])});
  }
  return arrays;
}

}  // namespace torchbeast
