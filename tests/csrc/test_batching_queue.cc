#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "arrays.h"
#include "batching_queue.h"

namespace torchbeast {

using Queue = BatchingQueue<int>;

BatchingOptions options(int64_t minimum, int64_t maximum) {
  BatchingOptions result;
  result.minimum_batch_size = minimum;
  result.maximum_batch_size = maximum;
  return result;
}

// Until the thread of `call` is blocked, or as good as.
template <typename T>
bool blocks(const std::future<T>& call) {
  return call.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout;
}

TEST_CASE("a batch has the items in order, and their payloads") {
  Queue queue(options(3, 4));
  queue.enqueue(single(count_up({1, 2}, 0)), 10);
  queue.enqueue(single(count_up({2, 2}, 2)), 11);
  CHECK(queue.size() == 2);
  const Queue::Batch batch = queue.dequeue_many();
  CHECK(batch.rows == 3);
  CHECK(batch.payloads == std::vector<int>{10, 11});
  CHECK(batch.arrays.leaves[0].shape == Dims{3, 2});
  CHECK(elements(batch.arrays.leaves[0]) == std::vector<int32_t>{0, 1, 2, 3, 4, 5});
  CHECK(queue.size() == 0);
}

TEST_CASE("items are joined along batch_dim, contiguously, however full the batch") {
  for (const int64_t room : {2, 3, 100}) {
    BatchingOptions o = options(2, room);
    o.batch_dim = 1;
    Queue queue(o);
    queue.enqueue(single(count_up({3, 1, 2}, 0)), 0);
    queue.enqueue(single(count_up({3, 1, 2}, 100)), 0);
    const Array array = queue.dequeue_many().arrays.leaves[0];
    CHECK(array.shape == Dims{3, 2, 2});
    CHECK(array.strides == contiguous_strides(array.shape));
    CHECK(elements(array) ==
          std::vector<int32_t>{0, 1, 100, 101, 2, 3, 102, 103, 4, 5, 104, 105});
  }
}

TEST_CASE("a batch never splits an item: fewer rows than the minimum instead") {
  Queue queue(options(4, 5));
  queue.enqueue(single(count_up({3})), 0);
  queue.enqueue(single(count_up({3})), 1);
  CHECK(queue.dequeue_many().rows == 3);  // At once: the second cannot fit.
  queue.close();
  CHECK(queue.dequeue_many().rows == 3);
}

TEST_CASE("a queue that grows has room for a few rows at first, then for all") {
  BatchingOptions o = options(2, 10);
  o.grow = true;
  std::vector<size_t> taken;
  Queue queue(o, [&](size_t bytes) {
    taken.push_back(bytes / 64);
    return heap_memory(bytes);
  });
  const auto rows_of = [&](int num) {
    for (int i = 0; i < num; ++i) queue.enqueue(single(count_up({1, 16}, i)), i);
    std::vector<int64_t> rows;
    while (queue.size() > 0) rows.push_back(queue.dequeue_many().rows);
    return rows;
  };
  CHECK(rows_of(2) == std::vector<int64_t>{2});
  CHECK(rows_of(6) == std::vector<int64_t>{2, 4});
  CHECK(rows_of(4) == std::vector<int64_t>{4});
  CHECK(rows_of(14) == std::vector<int64_t>{4, 8, 2});
  CHECK(rows_of(10) == std::vector<int64_t>{10});
  CHECK(rows_of(20) == std::vector<int64_t>{10, 10});
  CHECK(taken == std::vector<size_t>{2, 2, 4, 4, 4, 8, 10, 10, 10, 10});
}

TEST_CASE("a queue that grows has room for an item of any size that fits") {
  BatchingOptions o = options(1, 10);
  o.grow = true;
  Queue queue(o);
  queue.enqueue(single(count_up({7, 1})), 0);
  CHECK(queue.dequeue_many().rows == 7);
  CHECK_THROWS_AS(queue.enqueue(single(count_up({11, 1})), 0), std::invalid_argument);
}

TEST_CASE("dequeue_many blocks until there are minimum_batch_size rows") {
  Queue queue(options(2, 2));
  auto batch = std::async(std::launch::async, [&] { return queue.dequeue_many(); });
  CHECK(blocks(batch));
  queue.enqueue(single(count_up({1})), 0);
  CHECK(blocks(batch));
  queue.enqueue(single(count_up({1})), 0);
  CHECK(batch.get().rows == 2);
}

TEST_CASE("a time-out hands out what there is, but never nothing") {
  BatchingOptions o = options(10, 10);
  o.timeout_ms = 30;
  Queue queue(o);
  auto batch = std::async(std::launch::async, [&] { return queue.dequeue_many(); });
  CHECK(blocks(batch));
  const auto begin = Clock::now();
  queue.enqueue(single(count_up({1})), 0);
  CHECK(batch.get().rows == 1);
  CHECK(Clock::now() - begin >= std::chrono::milliseconds(25));
}

TEST_CASE("without a time to wait, a time-out of zero hands out at once") {
  BatchingOptions o = options(10, 10);
  o.timeout_ms = 0;
  Queue queue(o);
  queue.enqueue(single(count_up({1})), 0);
  CHECK(queue.dequeue_many().rows == 1);
}

TEST_CASE("enqueue blocks while the queue is full") {
  BatchingOptions o = options(1, 4);
  o.maximum_queue_size = 2;
  Queue queue(o);
  queue.enqueue(single(count_up({1})), 0);
  queue.enqueue(single(count_up({1})), 1);
  auto third =
      std::async(std::launch::async, [&] { queue.enqueue(single(count_up({1})), 2); });
  CHECK(blocks(third));
  CHECK(queue.dequeue_many().rows == 2);
  third.get();
  CHECK(queue.size() == 1);
}

TEST_CASE("room lets in as many of those that are blocked as it has places") {
  BatchingOptions o = options(4, 4);
  o.maximum_queue_size = 4;
  Queue queue(o);
  for (int i = 0; i < 4; ++i) queue.enqueue(single(count_up({1})), i);
  std::vector<std::thread> producers;
  for (int i = 0; i < 8; ++i) {
    producers.emplace_back([&] { queue.enqueue(single(count_up({1})), 0); });
  }
  for (int i = 0; i < 3; ++i) CHECK(queue.dequeue_many().rows == 4);
  for (std::thread& producer : producers) producer.join();
  CHECK(queue.size() == 0);
}

TEST_CASE("a batch is begun by one producer, and by the next if that fails") {
  std::atomic<int> num_allocations = 0;
  Queue queue(options(4, 4), [&](size_t n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (++num_allocations == 1) throw std::bad_alloc();
    return heap_memory(n);
  });
  std::atomic<int> num_failures = 0;
  std::vector<std::thread> producers;
  for (int i = 0; i < 5; ++i) {
    producers.emplace_back([&] {
      try {
        queue.enqueue(single(count_up({1})), 0);
      } catch (const std::invalid_argument&) {
        ++num_failures;
      }
    });
  }
  CHECK(queue.dequeue_many().rows == 4);
  for (std::thread& producer : producers) producer.join();
  CHECK(num_failures == 1);
  CHECK(num_allocations == 2);
}

TEST_CASE("all arrays of a batch are one allocation, and each is aligned") {
  std::atomic<int> num_allocations = 0;
  Queue queue(options(2, 3), counting(&num_allocations));
  for (int i = 0; i < 2; ++i) {
    queue.enqueue(make_nest<Array>(
                      tuple({leaf(), leaf(), leaf()}),
                      {count_up({1, 5}, i), count_up({1, 0}), count_up({1}, 10 * i)}),
                  i);
  }
  const Queue::Batch batch = queue.dequeue_many();
  CHECK(num_allocations == 1);
  CHECK(elements(batch.arrays.leaves[0]) ==
        std::vector<int32_t>{0, 1, 2, 3, 4, 1, 2, 3, 4, 5});
  CHECK(batch.arrays.leaves[1].shape == Dims{2, 0});
  CHECK(elements(batch.arrays.leaves[2]) == std::vector<int32_t>{0, 10});
  for (const Array& array : batch.arrays.leaves) {
    CHECK(reinterpret_cast<uintptr_t>(array.data.get()) % kAlignment == 0);
  }
}

TEST_CASE("a queue too short for a batch is not full before it has one") {
  BatchingOptions o = options(3, 3);
  o.maximum_queue_size = 1;
  Queue queue(o);
  for (int i = 0; i < 3; ++i) queue.enqueue(single(count_up({1})), i);
  CHECK(queue.dequeue_many().rows == 3);
}

TEST_CASE("close lets what was accepted be dequeued, then throws") {
  Queue queue(options(2, 2));
  for (int i = 0; i < 3; ++i) queue.enqueue(single(count_up({1})), i);
  queue.close();
  queue.close();
  CHECK(queue.is_closed());
  CHECK_THROWS_AS(queue.enqueue(single(count_up({1})), 9), Closed);
  CHECK(queue.dequeue_many().rows == 2);
  CHECK(queue.dequeue_many().payloads == std::vector<int>{2});
  CHECK_THROWS_AS((void)queue.dequeue_many(), Closed);
}

TEST_CASE("close(discard) throws away what waits") {
  Queue queue(options(2, 2));
  queue.enqueue(single(count_up({1})), 0);
  queue.close(/*discard=*/true);
  CHECK(queue.size() == 0);
  CHECK_THROWS_AS((void)queue.dequeue_many(), Closed);
}

TEST_CASE("close wakes a blocked enqueue and a blocked dequeue_many") {
  BatchingOptions o = options(1, 1);
  o.maximum_queue_size = 1;
  Queue full(o);
  full.enqueue(single(count_up({1})), 0);
  auto in =
      std::async(std::launch::async, [&] { full.enqueue(single(count_up({1})), 0); });
  Queue empty(o);
  auto out = std::async(std::launch::async, [&] { return empty.dequeue_many(); });
  CHECK(blocks(in));
  CHECK(blocks(out));
  full.close();
  empty.close();
  CHECK_THROWS_AS(in.get(), Closed);
  CHECK_THROWS_AS((void)out.get(), Closed);
}

TEST_CASE("what poll throws ends a blocked call") {
  Interrupting poll;
  BatchingOptions o = options(1, 1);
  o.maximum_queue_size = 1;
  Queue queue(o);
  CHECK_THROWS_AS((void)queue.dequeue_many(&poll), Interrupt);
  queue.enqueue(single(count_up({1})), 0);
  CHECK_THROWS_AS(queue.enqueue(single(count_up({1})), 0, &poll), Interrupt);
  CHECK(queue.size() == 1);  // The interrupted item has not gone in.
}

TEST_CASE("an item unlike the first is refused, and the queue lives on") {
  BatchingOptions o = options(2, 2);
  o.batch_dim = 1;
  Queue queue(o);
  const Structure s = dict({"x", "y"}, {leaf(), leaf()});
  const auto item = [&](const Dims& x, const Dims& y) {
    return make_nest<Array>(s, {count_up(x), count_up(y)});
  };
  queue.enqueue(item({2, 1}, {2, 1, 3}), 0);
  const auto refusal = [&](const Nest<Array>& other) {
    return message<std::invalid_argument>([&] { queue.enqueue(other, 1); });
  };
  CHECK(contains(refusal(item({2, 1}, {2, 1, 4})),
                 "leaf 'y' is int32 [2, 1, 4], expected int32 [2, 1, 3]"));
  CHECK(contains(refusal(item({2, 1}, {2, 2, 3})),
                 "leaf 'y' has shape [2, 2, 3]: 2 rows"));
  CHECK(contains(refusal(item({2}, {2, 1, 3})),
                 "leaf 'x' has shape [2], expected more than 1"));
  CHECK(contains(refusal(item({2, 3}, {2, 3, 3})), "3 rows along batch_dim=1"));
  CHECK(contains(refusal(item({2, 0}, {2, 0, 3})), "0 rows along batch_dim=1"));
  CHECK(contains(refusal(single(count_up({2, 1}))), "nests differ"));
  CHECK(contains(refusal(make_nest<Array>(tuple({}), {})), "at least one array"));
  Nest<Array> floats = item({2, 1}, {2, 1, 3});
  floats.leaves[0].dtype = {DType::kFloat, 32};
  CHECK(contains(refusal(floats), "leaf 'x' is float32 [2, 1], expected int32"));

  queue.enqueue(make_nest<Array>(dict({"y", "x"}, {leaf(), leaf()}),
                                 {count_up({2, 1, 3}, 50), count_up({2, 1}, 60)}),
                2);
  const Queue::Batch batch = queue.dequeue_many();
  CHECK(batch.payloads == std::vector<int>{0, 2});
  CHECK(elements(batch.arrays.leaves[0]) == std::vector<int32_t>{0, 60, 1, 61});
}

TEST_CASE("without the check, items unlike each other go into batches of their own") {
  BatchingOptions o = options(4, 4);
  o.check = false;
  Queue queue(o);
  queue.enqueue(single(count_up({1, 2})), 0);
  queue.enqueue(single(count_up({1, 2})), 1);
  queue.enqueue(single(count_up({1, 3})), 2);
  queue.close();
  CHECK(queue.dequeue_many().arrays.leaves[0].shape == Dims{2, 2});
  CHECK(queue.dequeue_many().arrays.leaves[0].shape == Dims{1, 3});
}

TEST_CASE("options that make no sense are refused by name") {
  const auto refusal = [](auto change) {
    BatchingOptions o;
    change(&o);
    return message<std::invalid_argument>([&] { Queue queue(o); });
  };
  CHECK(contains(refusal([](auto* o) { o->batch_dim = -1; }), "batch_dim is -1"));
  CHECK(contains(refusal([](auto* o) { o->batch_dim = 8; }), "batch_dim is 8"));
  CHECK(contains(refusal([](auto* o) { o->minimum_batch_size = 0; }),
                 "minimum_batch_size"));
  CHECK(contains(
      refusal([](auto* o) { o->minimum_batch_size = 2000; }),
      "maximum_batch_size is 1024, expected at least minimum_batch_size (2000)"));
  CHECK(contains(refusal([](auto* o) { o->maximum_batch_size = int64_t{1} << 40; }),
                 "less than 2^31"));
  CHECK(contains(refusal([](auto* o) { o->timeout_ms = -5; }), "timeout_ms is -5"));
  CHECK(contains(refusal([](auto* o) { o->maximum_queue_size = 0; }),
                 "maximum_queue_size"));
}

TEST_CASE(
    "batches outlive their queue, and their memory is used again while it lives") {
  std::atomic<int> num_allocations = 0;
  Queue::Batch last;
  {
    Queue queue(options(1, 4), recycling_allocator(counting(&num_allocations)));
    for (int i = 0; i < 1000; ++i) {
      queue.enqueue(single(count_up({2, 3}, i)), i);
      last = queue.dequeue_many();
    }
  }
  CHECK(elements(last.arrays.leaves[0]) ==
        std::vector<int32_t>{999, 1000, 1001, 1002, 1003, 1004});
  CHECK(num_allocations <= 2);
}

// Every item that enqueue() accepted comes out exactly once, whole and unchanged, or is
// in a queue that was closed to discard it.
TEST_CASE("stress: every accepted item is accounted for") {
  std::mt19937 seeds(7);
  for (int trial = 0; trial < 60; ++trial) {
    std::mt19937 random(seeds());
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    BatchingOptions o = options(pick(1, 6), pick(6, 12));
    o.batch_dim = pick(0, 1);
    if (pick(0, 1)) o.timeout_ms = pick(0, 2);
    if (pick(0, 1)) o.maximum_queue_size = pick(1, 20);
    const bool discard = pick(0, 3) == 0;
    o.check = pick(0, 3) != 0;  // Then items come in two shapes.
    const int num_producers = pick(1, 6);
    const int num_consumers = pick(1, 3);
    const int num_items = pick(1, 2) == 1 ? 100000 : pick(0, 100);
    Queue queue(o);

    std::vector<std::vector<int>> accepted(static_cast<size_t>(num_producers));
    std::vector<std::vector<int>> received(static_cast<size_t>(num_consumers));
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int p = 0; p < num_producers; ++p) {
      threads.emplace_back([&, p, seed = random()] {
        std::mt19937 mine(seed);
        Busy busy(seed);
        for (int i = 0; i < num_items; ++i) {
          const int id = p * 1000000 + i;
          const int rows = 1 + static_cast<int>(mine() % 6);
          const int width = o.check ? 2 : 2 + static_cast<int>(mine() % 2);
          const Array array =
              count_up(o.batch_dim == 0 ? Dims{rows, width} : Dims{width, rows});
          for (int k = 0; k < width * rows; ++k) {
            reinterpret_cast<int32_t*>(array.data.get())[k] = id;
          }
          // Two leaves, under keys in any order.
          const bool swapped = mine() % 2 != 0;
          const auto item =
              make_nest<Array>(dict(swapped ? std::vector<std::string>{"b", "a"}
                                            : std::vector<std::string>{"a", "b"},
                                    {leaf(), leaf()}),
                               {array, array});
          try {
            queue.enqueue(item, id * 8 + rows, i % 2 ? &busy : nullptr);
          } catch (const Interrupt&) {
            continue;
          } catch (const Closed&) {
            return;
          }
          accepted[static_cast<size_t>(p)].push_back(id);
        }
      });
    }
    for (int c = 0; c < num_consumers; ++c) {
      threads.emplace_back([&, c] {
        Busy busy(static_cast<uint32_t>(c));
        for (;;) {
          Queue::Batch batch;
          try {
            batch = queue.dequeue_many(c % 2 ? &busy : nullptr);
          } catch (const Interrupt&) {
            continue;
          } catch (const Closed&) {
            return;
          }
          if (batch.rows > o.maximum_batch_size) ++wrong;
          int64_t begin = 0;
          for (const int payload : batch.payloads) {
            const int rows = payload % 8;
            const int id = payload / 8;
            for (const Array& array : batch.arrays.leaves) {
              for (const int32_t x : elements(array.narrow(o.batch_dim, begin, rows))) {
                if (x != id) ++wrong;
              }
            }
            begin += rows;
            received[static_cast<size_t>(c)].push_back(id);
          }
          if (begin != batch.rows) ++wrong;
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(pick(0, 100)));
    queue.close(discard);
    for (std::thread& thread : threads) thread.join();

    const auto sorted = [](const std::vector<std::vector<int>>& lists) {
      std::vector<int> all;
      for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
      std::sort(all.begin(), all.end());
      return all;
    };
    const std::vector<int> in = sorted(accepted);
    const std::vector<int> out = sorted(received);
    CHECK(wrong == 0);
    CHECK(std::adjacent_find(out.begin(), out.end()) == out.end());
    if (discard) {
      CHECK(std::includes(in.begin(), in.end(), out.begin(), out.end()));
    } else {
      CHECK(in == out);
    }
    CHECK(queue.size() == 0);
  }
}

}  // namespace torchbeast
