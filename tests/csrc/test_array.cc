#include <random>
#include <thread>

#include "array.h"
#include "arrays.h"

namespace torchbeast {

TEST_CASE("narrow shares memory") {
  const Array array = count_up({3, 4});
  const Array part = array.narrow(1, 1, 2);
  CHECK(elements(part) == std::vector<int32_t>{1, 2, 5, 6, 9, 10});
  CHECK(elements(array.narrow(0, 2, 1)) == std::vector<int32_t>{8, 9, 10, 11});
  CHECK(part.data.get() == array.data.get() + 4);
}

TEST_CASE("memory lives as long as a part of it") {
  Array part;
  {
    const Array array = count_up({3, 4});
    part = array.narrow(0, 2, 1);
  }
  CHECK(elements(part) == std::vector<int32_t>{8, 9, 10, 11});
}

TEST_CASE("copy agrees with an element by element copy for any shape and strides") {
  std::mt19937 random(1);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 2000; ++trial) {
    const int rank = static_cast<int>(pick(0, 4));
    const size_t item = size_t{1} << pick(0, 3);
    const DType dtype{DType::kInt, static_cast<uint8_t>(8 * item)};
    // Two arrays of the same shape inside of larger ones, dimensions in another order.
    Dims shape;
    for (int i = 0; i < rank; ++i) shape.push_back(pick(0, 3) == 0 ? 1 : pick(0, 5));
    const auto within_larger = [&] {
      Dims order;
      for (int i = 0; i < rank; ++i) order.push_back(i);
      if (pick(0, 1)) std::shuffle(order.data(), order.data() + rank, random);
      Array array{dtype, shape, shape, nullptr};
      int64_t stride = 1;
      for (int i = rank - 1; i >= 0; --i) {
        const int dim = static_cast<int>(order[i]);
        array.strides[dim] = stride;
        stride *= std::max<int64_t>(1, shape[dim]) + pick(0, 1);
      }
      array.data = heap_memory(static_cast<size_t>(stride) * item);
      for (size_t i = 0; i < static_cast<size_t>(stride) * item; ++i) {
        array.data.get()[i] = static_cast<std::byte>(random());
      }
      return array;
    };
    const Array from = within_larger();
    const Array to = within_larger();
    copy(from, to);

    Dims index;
    for (int i = 0; i < rank; ++i) index.push_back(0);
    for (int64_t n = 0; n < shape.product(); ++n) {
      int64_t rest = n;
      int64_t from_offset = 0;
      int64_t to_offset = 0;
      for (int i = rank - 1; i >= 0; --i) {
        from_offset += rest % shape[i] * from.strides[i];
        to_offset += rest % shape[i] * to.strides[i];
        rest /= shape[i];
      }
      REQUIRE(std::memcmp(from.data.get() + from_offset * static_cast<int64_t>(item),
                          to.data.get() + to_offset * static_cast<int64_t>(item),
                          item) == 0);
    }
  }
}

TEST_CASE("more than eight dimensions are refused") {
  Dims dims{1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(contains(message<std::invalid_argument>([&] { dims.push_back(9); }),
                 "at most 8 dimensions"));
}

TEST_CASE("types have the names that users know") {
  CHECK(DType{DType::kBool, 8}.name() == "bool");
  CHECK(DType{DType::kBfloat, 16}.name() == "bfloat16");
  CHECK(DType{DType::kUInt, 8}.name() == "uint8");
  CHECK(DType{DType::kFloat, 64}.name() == "float64");
  CHECK_FALSE(DType{DType::kFloat, 8}.valid());
  CHECK_FALSE(DType{5, 64}.valid());
}

TEST_CASE("a pool gives out again what came back, and aligned") {
  std::atomic<int> num_allocations = 0;
  const auto pool = std::make_shared<BufferPool>(counting(&num_allocations));
  const std::byte* first = nullptr;
  for (int i = 0; i < 10; ++i) {
    const auto buffer = pool->allocate(1000);
    if (i == 0) first = buffer.get();
    CHECK(buffer.get() == first);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer.get()) % 64 == 0);
  }
  const auto a = pool->allocate(1000);
  const auto b = pool->allocate(1000);
  CHECK(a.get() != b.get());
  CHECK(num_allocations == 2);
}

TEST_CASE("a pool gives memory back to its source when nobody has it any more") {
  int out = 0;
  auto pool = std::make_shared<BufferPool>([&](size_t bytes) {
    ++out;
    return std::shared_ptr<std::byte>(new std::byte[bytes], [&out](std::byte* b) {
      delete[] b;
      --out;
    });
  });
  auto buffer = pool->allocate(100);
  pool->allocate(100).reset();
  CHECK(out == 2);
  pool.reset();
  CHECK(out == 2);
  buffer.reset();
  CHECK(out == 0);
}

TEST_CASE("memory that is out outlives its pool's owner") {
  auto pool = std::make_shared<BufferPool>();
  const auto buffer = pool->allocate(100);
  pool.reset();
  std::memset(buffer.get(), 1, 100);
}

TEST_CASE("a pool serves many threads") {
  std::atomic<int> num_allocations = 0;
  const auto pool = std::make_shared<BufferPool>(counting(&num_allocations));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        const size_t bytes = 64 << (i % 3);
        const auto buffer = pool->allocate(bytes);
        std::memset(buffer.get(), t, bytes);
        REQUIRE(buffer.get()[bytes - 1] == static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_allocations <= 12);  // Three sizes, four threads.
}

}  // namespace torchbeast
