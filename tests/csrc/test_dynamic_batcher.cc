#include <algorithm>
#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "arrays.h"
#include "dynamic_batcher.h"

namespace torchbeast {

BatchingOptions batching(int64_t minimum, int64_t maximum, int batch_dim = 0) {
  BatchingOptions result;
  result.batch_dim = batch_dim;
  result.minimum_batch_size = minimum;
  result.maximum_batch_size = maximum;
  return result;
}

using Result = std::future<Nest<Array>>;

Result compute(DynamicBatcher* batcher, Array input) {
  return std::async(std::launch::async, [batcher, input = std::move(input)] {
    return batcher->compute(single(input));
  });
}

void wait_for_size(const DynamicBatcher& batcher, int64_t size) {
  while (batcher.size() != size) std::this_thread::yield();
}

TEST_CASE("each caller gets its rows of the outputs") {
  for (const int dim : {0, 1}) {
    DynamicBatcher batcher(batching(5, 5, dim));
    Result a = compute(&batcher, count_up(dim == 0 ? Dims{2, 2} : Dims{2, 2}, 10));
    wait_for_size(batcher, 1);
    Result b = compute(&batcher, count_up(dim == 0 ? Dims{3, 2} : Dims{2, 3}, 20));
    const auto batch = batcher.get_batch();
    CHECK(batch->size() == 5);
    batch->set_outputs(batch->get_inputs());
    CHECK(elements(a.get().leaves[0]) == elements(count_up({2, 2}, 10)));
    CHECK(elements(b.get().leaves[0]) == elements(count_up({6}, 20)));
  }
}

TEST_CASE("outputs are copied: their memory may change afterwards") {
  DynamicBatcher batcher(batching(1, 1));
  Result result = compute(&batcher, count_up({1, 3}));
  const Array output = count_up({1, 3}, 5);
  batcher.get_batch()->set_outputs(single(output));
  std::memset(output.data.get(), 0, 12);
  CHECK(elements(result.get().leaves[0]) == std::vector<int32_t>{5, 6, 7});
}

TEST_CASE("outputs of the wrong batch size are refused, and right ones still taken") {
  DynamicBatcher batcher(batching(2, 2));
  Result result = compute(&batcher, count_up({2}));
  const auto batch = batcher.get_batch();
  CHECK(contains(message<std::invalid_argument>(
                     [&] { batch->set_outputs(single(count_up({3}))); }),
                 "3 rows along batch_dim=0, expected 2"));
  batch->set_outputs(single(count_up({2}, 8)));
  CHECK(elements(result.get().leaves[0]) == std::vector<int32_t>{8, 9});
  CHECK(contains(
      message<std::runtime_error>([&] { batch->set_outputs(single(count_up({2}))); }),
      "twice"));
}

TEST_CASE("outputs unlike the first ones are refused, unless the check is off") {
  for (const bool check : {true, false}) {
    DynamicBatcher batcher(batching(1, 1), check);
    Result first = compute(&batcher, count_up({1}));
    batcher.get_batch()->set_outputs(single(count_up({1, 2})));
    (void)first.get();
    Result second = compute(&batcher, count_up({1}));
    auto batch = batcher.get_batch();
    if (check) {
      CHECK_THROWS_AS(batch->set_outputs(single(count_up({1, 3}))),
                      std::invalid_argument);
      batch.reset();
      CHECK_THROWS_AS((void)second.get(), AsyncError);
    } else {
      batch->set_outputs(single(count_up({1, 3})));
      CHECK(second.get().leaves[0].shape == Dims{1, 3});
    }
  }
}

TEST_CASE("the callers of a dropped batch get an error at once") {
  DynamicBatcher batcher(batching(2, 2));
  Result a = compute(&batcher, count_up({1}));
  Result b = compute(&batcher, count_up({1}));
  batcher.get_batch().reset();
  CHECK_THROWS_AS((void)a.get(), AsyncError);
  CHECK_THROWS_AS((void)b.get(), AsyncError);
}

TEST_CASE(
    "close ends calls that wait for a batch, and those whose batch is evaluated") {
  DynamicBatcher batcher(batching(1, 1));
  Result evaluated = compute(&batcher, count_up({1}));
  const auto batch = batcher.get_batch();
  Result waiting = compute(&batcher, count_up({1}));
  wait_for_size(batcher, 1);
  batcher.close();
  batcher.close();
  CHECK_THROWS_AS((void)evaluated.get(), Closed);
  CHECK_THROWS_AS((void)waiting.get(), Closed);
  CHECK_THROWS_AS((void)batcher.get_batch(), Closed);
  CHECK_THROWS_AS((void)batcher.compute(single(count_up({1}))), Closed);
  batch->set_outputs(single(count_up({1})));  // No one is interested.
}

TEST_CASE("close ends a blocked get_batch") {
  DynamicBatcher batcher(batching(1, 1));
  auto batch = std::async(std::launch::async, [&] { return batcher.get_batch(); });
  CHECK(batch.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
  batcher.close();
  CHECK_THROWS_AS((void)batch.get(), Closed);
}

TEST_CASE("inputs that cannot be batched are their caller's error alone") {
  DynamicBatcher batcher(batching(1, 2));
  Result good = compute(&batcher, count_up({1, 2}));
  wait_for_size(batcher, 1);
  CHECK_THROWS_AS((void)batcher.compute(single(count_up({1, 3}))),
                  std::invalid_argument);
  const auto batch = batcher.get_batch();
  batch->set_outputs(batch->get_inputs());
  CHECK(elements(good.get().leaves[0]) == std::vector<int32_t>{0, 1});
}

TEST_CASE("a call that poll ends leaves its batch to the others") {
  Interrupting poll;
  DynamicBatcher batcher(batching(2, 2));
  CHECK_THROWS_AS((void)batcher.compute(single(count_up({1})), &poll), Interrupt);
  Result other = compute(&batcher, count_up({1}, 3));
  const auto batch = batcher.get_batch();
  batch->set_outputs(batch->get_inputs());
  CHECK(elements(other.get().leaves[0]) == std::vector<int32_t>{3});
}

TEST_CASE("a batch outlives its batcher") {
  std::unique_ptr<DynamicBatcher::Batch> batch;
  {
    DynamicBatcher batcher(batching(1, 1));
    Result result = compute(&batcher, count_up({1}));
    batch = batcher.get_batch();
    batcher.close();
    CHECK_THROWS_AS((void)result.get(), Closed);
  }
  batch->set_outputs(batch->get_inputs());
}

// Every call ends: with its own rows, doubled; or with an error, if its batch was
// dropped or the batcher closed.
TEST_CASE("stress: every call is answered, with its own rows") {
  std::mt19937 seeds(3);
  for (int trial = 0; trial < 40; ++trial) {
    std::mt19937 random(seeds());
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    const int num_callers = pick(1, 8);
    BatchingOptions o = batching(1, pick(4, 16), pick(0, 1));
    if (pick(0, 1)) {
      o.minimum_batch_size = pick(1, 4);
      o.timeout_ms = pick(0, 2);
    }
    DynamicBatcher batcher(o);
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> answers{0};
    std::atomic<int64_t> dropped{0};
    std::atomic<int64_t> closed{0};
    std::atomic<int64_t> wrong{0};
    std::atomic<int64_t> interrupted{0};
    std::vector<std::thread> threads;
    for (int c = 0; c < num_callers; ++c) {
      threads.emplace_back([&, c, seed = random()] {
        std::mt19937 mine(seed);
        Busy busy(seed);
        for (int i = 0;; ++i) {
          const int rows = 1 + static_cast<int>(mine() % 4);
          const Array input = count_up(o.batch_dim == 0 ? Dims{rows, 3} : Dims{3, rows},
                                       c * 1000 + i % 1000);
          ++calls;
          try {
            const Nest<Array> output =
                batcher.compute(single(input), i % 2 ? &busy : nullptr);
            std::vector<int32_t> expected = elements(input);
            for (int32_t& x : expected) x *= 2;
            if (elements(output.leaves[0]) != expected) ++wrong;
            ++answers;
          } catch (const Interrupt&) {
            ++interrupted;
          } catch (const AsyncError&) {
            ++dropped;
          } catch (const Closed&) {
            ++closed;
            return;
          }
        }
      });
    }
    for (int t = 0; t < pick(1, 3); ++t) {
      threads.emplace_back([&, seed = random()] {
        std::mt19937 mine(seed);
        try {
          for (;;) {
            const auto batch = batcher.get_batch();
            if (mine() % 20 == 0) continue;  // Dropped.
            const Array& input = batch->get_inputs().leaves[0];
            const Array output = allocate_array(heap_memory, input.dtype, input.shape);
            for (int64_t i = 0; i < input.shape.product(); ++i) {
              reinterpret_cast<int32_t*>(output.data.get())[i] =
                  2 * reinterpret_cast<int32_t*>(input.data.get())[i];
            }
            batch->set_outputs(single(output));
          }
        } catch (const Closed&) {
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(pick(0, 100)));
    batcher.close();
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(closed == num_callers);
    CHECK(calls == answers + dropped + closed + interrupted);
    CHECK(batcher.size() == 0);
  }
}

}  // namespace torchbeast
