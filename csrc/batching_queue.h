// BatchingQueue: items go in, batches come out.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "nest.h"
#include "wait.h"

namespace torchbeast {

// A queue or batcher was closed: nothing more goes in, or comes out.
struct Closed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace internal {

inline void require(bool ok, const std::string& name, int64_t value,
                    const std::string& expected) {
  if (ok) return;
  throw std::invalid_argument(name + " is " + std::to_string(value) + ", expected " +
                              expected);
}

}  // namespace internal

struct BatchingOptions {
  int batch_dim = 0;
  int64_t minimum_batch_size = 1;
  int64_t maximum_batch_size = 1024;
  std::optional<int64_t> timeout_ms;
  bool check = true;
  std::optional<int64_t> maximum_queue_size;
  // Whether a batch has room for minimum_batch_size rows at first, and for twice as
  // many when that was too few, up to maximum_batch_size: for memory that is taken when
  // it is allocated, and not when it is written to.
  bool grow = false;

  void validate() const {
    using internal::require;
    require(batch_dim >= 0 && batch_dim < kMaxRank, "batch_dim", batch_dim,
            "0 to " + std::to_string(kMaxRank - 1));
    require(minimum_batch_size >= 1, "minimum_batch_size", minimum_batch_size,
            "at least 1");
    require(maximum_batch_size >= minimum_batch_size, "maximum_batch_size",
            maximum_batch_size,
            "at least minimum_batch_size (" + std::to_string(minimum_batch_size) + ")");
    require(maximum_batch_size <= std::numeric_limits<int32_t>::max(),
            "maximum_batch_size", maximum_batch_size, "less than 2^31");
    require(timeout_ms.value_or(0) >= 0 &&
                timeout_ms.value_or(0) <= std::numeric_limits<int32_t>::max(),
            "timeout_ms", timeout_ms.value_or(0), "None or 0 to 2^31 - 1");
    require(maximum_queue_size.value_or(1) >= 1, "maximum_queue_size",
            maximum_queue_size.value_or(1), "None or at least 1");
  }
};

// How many rows the arrays have along batch_dim. Throws invalid_argument if they differ
// in that, or have no such dimension.
[[nodiscard]] inline int64_t num_rows(const Nest<Array>& nest, int batch_dim) {
  if (nest.leaves.empty()) {
    throw std::invalid_argument("expected at least one array, got a nest without any");
  }
  for (size_t i = 0; i < nest.leaves.size(); ++i) {
    const Dims& shape = nest.leaves[i].shape;
    if (shape.rank() <= batch_dim) {
      throw std::invalid_argument(
          nest.structure->leaf_name(i) + " has shape " + shape.str() +
          ", expected more than " + std::to_string(batch_dim) +
          " dimensions (batch_dim=" + std::to_string(batch_dim) + ")");
    }
    if (shape[batch_dim] != nest.leaves[0].shape[batch_dim]) {
      throw std::invalid_argument(nest.structure->leaf_name(i) + " has shape " +
                                  shape.str() + ": " +
                                  std::to_string(shape[batch_dim]) +
                                  " rows along batch_dim=" + std::to_string(batch_dim) +
                                  ", but " + nest.structure->leaf_name(0) + " has " +
                                  std::to_string(nest.leaves[0].shape[batch_dim]));
    }
  }
  return nest.leaves[0].shape[batch_dim];
}

// Copying so many bytes takes longer than giving the GIL away.
inline constexpr int64_t kLongCopy = 128 * 1024;

[[nodiscard]] inline int64_t num_bytes(const std::vector<Array>& arrays) {
  int64_t sum = 0;
  for (const Array& array : arrays) {
    sum += array.shape.product() * static_cast<int64_t>(array.dtype.bytes());
  }
  return sum;
}

// What the items of one batch have in common: structure, dtypes, and sizes but along
// batch_dim.
struct RowSpec {
  std::shared_ptr<const Structure> structure;
  std::vector<std::pair<DType, Dims>> leaves;

  RowSpec() = default;
  explicit RowSpec(const Nest<Array>& nest) : structure(nest.structure) {
    for (const Array& array : nest.leaves)
      leaves.emplace_back(array.dtype, array.shape);
  }

  // The nest's leaves in this order. Throws invalid_argument that names the first one
  // that differs.
  [[nodiscard]] std::vector<Array> match(const Nest<Array>& nest, int batch_dim) const {
    std::vector<Array> arrays = nest.leaves_as(*structure);
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto& [dtype, shape] = leaves[i];
      Dims expected = shape;
      if (arrays[i].shape.rank() > batch_dim) {
        expected[batch_dim] = arrays[i].shape[batch_dim];
      }
      if (arrays[i].dtype == dtype && arrays[i].shape == expected) continue;
      throw std::invalid_argument(structure->leaf_name(i) + " is " +
                                  arrays[i].dtype.name() + " " + arrays[i].shape.str() +
                                  ", expected " + dtype.name() + " " + expected.str() +
                                  " like the first");
    }
    return arrays;
  }
};

// A bounded FIFO of items, handed out in batches. Any number of producers and
// consumers.
//
// An item is a nest of arrays of one or more rows along batch_dim, and a payload. A
// batch never splits an item, and has as many of those that wait, oldest first, as fit
// into maximum_batch_size rows. Items are copied by the threads that bring them, each
// straight into its place in the batch to come.
//
//   enqueue()       blocks while the queue is full: maximum_queue_size items wait, and
//                   a batch among them is ready. Returns when the item is copied.
//                   Throws Closed, and invalid_argument for an item that cannot be
//                   batched with the first one; in both cases it has not gone in.
//   dequeue_many()  blocks until a batch is ready: minimum_batch_size rows, or fewer if
//                   the next item does not fit, or if timeout_ms have passed since the
//                   first came, or if the queue is closed. Throws Closed if it is
//                   closed and drained.
//   close()         may be called twice. Wakes everyone. What was accepted can still be
//                   dequeued, unless `discard` throws it away.
//   size()          items that wait, those being copied included.
//
// With check = false, items that cannot be batched together go into batches of their
// own. No callback, no payload's destructor and no allocation of arrays runs under the
// lock. Join your threads before destroying it; batches may outlive it.
template <typename Payload>
class BatchingQueue {
 public:
  struct Batch {
    Nest<Array> arrays;  // Contiguous, `rows` rows along batch_dim.
    int64_t rows = 0;
    std::vector<Payload> payloads;  // Its items', in order.
  };

  explicit BatchingQueue(const BatchingOptions& options,
                         Allocate allocate = recycling_allocator())
      : options_(options),
        allocate_(std::move(allocate)),
        room_(options.grow ? options.minimum_batch_size : options.maximum_batch_size) {
    options_.validate();
  }
  BatchingQueue(const BatchingQueue&) = delete;
  BatchingQueue& operator=(const BatchingQueue&) = delete;

  void enqueue(const Nest<Array>& item, Payload payload, Blocking* blocking = nullptr) {
    const int64_t rows = num_rows(item, options_.batch_dim);
    if (rows < 1 || rows > options_.maximum_batch_size) {
      throw std::invalid_argument(
          "the item has " + std::to_string(rows) + " rows along batch_dim=" +
          std::to_string(options_.batch_dim) + ", expected 1 to maximum_batch_size (" +
          std::to_string(options_.maximum_batch_size) + ")");
    }

    std::shared_ptr<Filling> batch;  // The one that the item goes into.
    std::vector<Array> arrays;       // The item's, in the batch's order.
    int64_t begin = 0;
    try {
      std::unique_lock<std::mutex> lock(mu_);
      wait(&lock, &not_full_, blocking, std::nullopt,
           [&] { return closed_ || !(full() || beginning_); });
      if (closed_) throw Closed("enqueue to a closed queue");
      const bool first = !options_.check || !spec_.structure;
      // With the check, all batches have the very spec of the first item.
      if (!first) arrays = spec_.match(item, options_.batch_dim);
      if (!batches_.empty() && fits(*batches_.back(), item, rows, &arrays)) {
        batch = batches_.back();
      } else {
        // One producer at a time: a BufferPool keeps all that was ever out at once.
        const RowSpec spec = first ? RowSpec(item) : spec_;
        if (!batches_.empty()) grow(batches_.back()->rows + rows);
        grow(rows);
        const int64_t room = room_;
        beginning_ = true;
        lock.unlock();
        try {
          batch = begin_batch(spec, room);
        } catch (...) {
          lock.lock();
          beginning_ = false;
          throw;
        }
        lock.lock();
        beginning_ = false;
        if (closed_) throw Closed("enqueue to a closed queue");
        arrays = batch->spec.match(item, options_.batch_dim);
        if (first && options_.check) spec_ = batch->spec;
        batches_.push_back(batch);
      }
      batch->payloads.push_back(std::move(payload));
      if (batch->payloads.size() == 1) batch->opened = Clock::now();
      begin = batch->rows;
      batch->rows += rows;
      ++batch->num_writers;
      ++size_;
      if (head_ready() || (options_.timeout_ms && batch->payloads.size() == 1)) {
        ready_.notify_all();
      }
      if (!full()) not_full_.notify_one();
    } catch (...) {
      not_full_.notify_one();
      throw;
    }
    if (blocking != nullptr && num_bytes(arrays) > kLongCopy) blocking->begin();
    for (size_t i = 0; i < arrays.size(); ++i) {
      copy(arrays[i], batch->arrays.leaves[i].narrow(options_.batch_dim, begin, rows));
    }
    bool last = false;
    {
      std::lock_guard<std::mutex> lock(mu_);
      last = --batch->num_writers == 0 && batch->taken;
    }
    if (last) written_.notify_all();
  }

  [[nodiscard]] Batch dequeue_many(Blocking* blocking = nullptr) {
    std::shared_ptr<Filling> batch;
    {
      std::unique_lock<std::mutex> lock(mu_);
      for (;;) {
        // Without a first item there is no time-out yet; its arrival begins one.
        const bool idle = batches_.empty();
        const auto until = idle ? std::nullopt : expiry(*batches_.front());
        wait(&lock, &ready_, blocking, until, [&] {
          return closed_ || head_ready() ||
                 (idle && options_.timeout_ms && !batches_.empty());
        });
        if (batches_.empty()) {
          if (closed_) throw Closed("the queue is closed and drained");
          continue;
        }
        const auto expired = expiry(*batches_.front());
        if (closed_ || head_ready() || (expired && Clock::now() >= *expired)) break;
      }
      batch = std::move(batches_.front());
      batches_.pop_front();
      batch->taken = true;
      size_ -= static_cast<int64_t>(batch->payloads.size());
      if (head_ready()) ready_.notify_all();
      not_full_.notify_one();
      // Its last items may still be being copied, which takes no longer than a memcpy.
      if (batch->num_writers > 0 && blocking != nullptr) {
        lock.unlock();
        blocking->begin();
        lock.lock();
      }
      written_.wait(lock, [&] { return batch->num_writers == 0; });
    }
    Batch result{std::move(batch->arrays), batch->rows, std::move(batch->payloads)};
    if (blocking != nullptr && result.rows < batch->room && options_.batch_dim > 0 &&
        num_bytes(result.arrays.leaves) > kLongCopy) {
      blocking->begin();
    }
    for (Array& array : result.arrays.leaves) trim(&array, result.rows);
    return result;
  }

  void close(bool discard = false) {
    std::deque<std::shared_ptr<Filling>> dropped;  // Destroyed after the lock.
    {
      std::lock_guard<std::mutex> lock(mu_);
      closed_ = true;
      if (discard) {
        dropped.swap(batches_);
        size_ = 0;
      }
    }
    ready_.notify_all();
    not_full_.notify_all();
  }

  [[nodiscard]] bool is_closed() const {
    std::lock_guard<std::mutex> lock(mu_);
    return closed_;
  }

  [[nodiscard]] int64_t size() const {
    std::lock_guard<std::mutex> lock(mu_);
    return size_;
  }

  [[nodiscard]] const BatchingOptions& options() const { return options_; }

 private:
  // A batch that items are being written into.
  struct Filling {
    RowSpec spec;
    Nest<Array> arrays;
    std::vector<Payload> payloads;
    int64_t room = 0;          // Rows of the arrays.
    int64_t rows = 0;          // Given to items.
    int num_writers = 0;       // Threads that copy into it.
    bool taken = false;        // By a consumer, who waits for the writers.
    Clock::time_point opened;  // When its first item came.
  };

  [[nodiscard]] std::shared_ptr<Filling> begin_batch(const RowSpec& spec,
                                                     int64_t room) const {
    auto batch = std::make_shared<Filling>();
    batch->spec = spec;
    batch->room = room;
    batch->arrays.structure = spec.structure;
    std::vector<std::pair<DType, Dims>> leaves = spec.leaves;
    for (auto& [dtype, shape] : leaves) {
      shape[options_.batch_dim] = room;
    }
    try {  // All at once: every producer waits for it.
      batch->arrays.leaves = allocate_arrays(allocate_, leaves);
    } catch (const std::bad_alloc&) {
      throw std::invalid_argument(spec.structure->leaf_name(0) +
                                  ": no memory for a batch: " + leaves[0].first.name() +
                                  " " + leaves[0].second.str() +
                                  (leaves.size() > 1 ? ", and of all others" : ""));
    }
    return batch;
  }

  // Whether the item goes into the batch. If so, `arrays` are its in the batch's order.
  [[nodiscard]] bool fits(const Filling& batch, const Nest<Array>& item, int64_t rows,
                          std::vector<Array>* arrays) const {
    if (batch.rows + rows > batch.room) return false;
    if (options_.check) return true;
    try {
      *arrays = batch.spec.match(item, options_.batch_dim);
      return true;
    } catch (const std::invalid_argument&) {
      return false;
    }
  }

  // mu_ must be held for these.
  void grow(int64_t rows) {
    if (rows > options_.maximum_batch_size) return;
    while (room_ < rows) room_ = std::min(2 * room_, options_.maximum_batch_size);
  }
  [[nodiscard]] std::optional<Clock::time_point> expiry(const Filling& batch) const {
    if (!options_.timeout_ms) return std::nullopt;
    return batch.opened + std::chrono::milliseconds(*options_.timeout_ms);
  }
  [[nodiscard]] bool head_ready() const {
    return batches_.size() > 1 ||
           (!batches_.empty() && batches_.front()->rows >= options_.minimum_batch_size);
  }
  [[nodiscard]] bool full() const {
    return options_.maximum_queue_size && size_ >= *options_.maximum_queue_size &&
           head_ready();
  }

  // A batch of fewer rows than there is room for becomes contiguous: in place, as rows
  // only move towards the front.
  void trim(Array* array, int64_t rows) const {
    const int dim = options_.batch_dim;
    const int64_t room = array->shape[dim];
    if (rows == room) return;
    const int64_t outer = array->shape.product(0, dim);
    const auto row_bytes =
        static_cast<size_t>(array->strides[dim]) * array->dtype.bytes();
    for (int64_t i = 1; i < outer; ++i) {
      std::memmove(array->data.get() + static_cast<size_t>(i * rows) * row_bytes,
                   array->data.get() + static_cast<size_t>(i * room) * row_bytes,
                   static_cast<size_t>(rows) * row_bytes);
    }
    array->shape[dim] = rows;
    array->strides = contiguous_strides(array->shape);
  }

  const BatchingOptions options_;
  const Allocate allocate_;

  mutable std::mutex mu_;
  std::condition_variable ready_;  // A batch may be ready, or closed_.
  // Items may go in, or closed_. Wakes one producer, which wakes the next.
  std::condition_variable not_full_;
  std::condition_variable written_;               // A taken batch has no more writers.
  std::deque<std::shared_ptr<Filling>> batches_;  // Guarded by mu_. The last grows.
  int64_t size_ = 0;                              // Guarded by mu_.
  int64_t room_;            // Guarded by mu_. Rows of the batch that begins next.
  bool beginning_ = false;  // Guarded by mu_. A batch, see enqueue().
  bool closed_ = false;     // Guarded by mu_.
  RowSpec spec_;            // Guarded by mu_. Of the first item.
};

}  // namespace torchbeast
