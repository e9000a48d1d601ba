// DynamicBatcher: many threads ask, one evaluates what they ask in batches.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "array.h"
#include "batching_queue.h"
#include "nest.h"
#include "wait.h"

namespace torchbeast {

// The batch that a call was part of got no outputs.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where the time of a compute() went.
struct CallSeconds {
  double queue = 0;       // Until its batch was taken.
  double evaluation = 0;  // From then until it had outputs.
};

namespace internal {

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// One compute() that waits for its outputs. The first answer counts.
class Call {
 public:
  explicit Call(int64_t rows) : rows_(rows) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void answer(Nest<Array> outputs) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (outputs_ || error_) return;
      outputs_ = std::move(outputs);
    }
    answered_.notify_one();
  }

  void fail(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (outputs_ || error_) return;
      error_ = std::move(error);
    }
    answered_.notify_one();
  }

  [[nodiscard]] Nest<Array> wait(Blocking* blocking) {
    std::unique_lock<std::mutex> lock(mu_);
    torchbeast::wait(&lock, &answered_, blocking, std::nullopt,
                     [&] { return outputs_ || error_; });
    if (error_) std::rethrow_exception(error_);
    return std::move(*outputs_);
  }

  // Its batch was taken.
  void taken() {
    std::lock_guard<std::mutex> lock(mu_);
    taken_at_ = Clock::now();
  }

  // After wait().
  [[nodiscard]] CallSeconds seconds() {
    std::lock_guard<std::mutex> lock(mu_);
    return {seconds_between(began_at_, taken_at_),
            seconds_between(taken_at_, Clock::now())};
  }

  [[nodiscard]] int64_t rows() const { return rows_; }

 private:
  const int64_t rows_;
  const Clock::time_point began_at_ = Clock::now();
  std::mutex mu_;
  Clock::time_point taken_at_;          // Guarded by mu_.
  std::condition_variable answered_;    // outputs_ or error_ is set.
  std::optional<Nest<Array>> outputs_;  // Guarded by mu_.
  std::exception_ptr error_;            // Guarded by mu_.
};

// A call's place in a queue or a batch. Whoever drops it answers the call with an
// error.
class Ticket {
 public:
  explicit Ticket(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  Ticket(Ticket&&) noexcept = default;
  Ticket& operator=(Ticket&&) noexcept = default;
  ~Ticket() {
    if (call_ == nullptr) return;
    call_->fail(std::make_exception_ptr(
        AsyncError("the batch was dropped without set_outputs()")));
  }

  [[nodiscard]] Call* operator->() const { return call_.get(); }

 private:
  std::shared_ptr<Call> call_;
};

}  // namespace internal

// Batches the inputs of many callers, and hands each its rows of the outputs.
//
//   compute()    blocks until its batch has outputs; returns its rows of them. Throws
//                Closed if the batcher is or gets closed, at once even if its batch is
//                being evaluated; AsyncError if its batch was dropped; invalid_argument
//                for inputs that cannot be batched with the first ones.
//   get_batch()  blocks as BatchingQueue::dequeue_many(). Throws Closed once closed.
//   close()      may be called twice. Wakes everyone. Inputs that wait are thrown away.
//
//   Batch::get_inputs()   never blocks; the inputs of its callers, one after the other.
//   Batch::set_outputs()  never blocks. Copies the outputs, whose memory may be used
//                for something else, and wakes the callers. Throws invalid_argument
//                for outputs of another batch size or, with check = true, of another
//                structure, dtype or row shape than the first outputs were; the batch
//                is then still open. Throws runtime_error the second time.
//   Batch::set_error()    never blocks. Its callers get an AsyncError with the message.
//   Batch::~Batch()       without outputs, its callers get an AsyncError.
//
// Any thread may call any of them; a batch is used by one thread at a time. Join your
// threads before destroying the batcher; batches may outlive it.
class DynamicBatcher {
  struct Outputs;

 public:
  class Batch {
   public:
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    [[nodiscard]] const Nest<Array>& get_inputs() const { return batch_.arrays; }
    [[nodiscard]] int64_t size() const { return batch_.rows; }

    void set_outputs(const Nest<Array>& outputs, Blocking* blocking = nullptr) {
      const std::unique_lock<std::mutex> lock(mu_, std::try_to_lock);
      if (!lock || answered_) {
        throw std::runtime_error("set_outputs() was called twice");
      }
      const int dim = outputs_->batch_dim;
      const int64_t rows = num_rows(outputs, dim);
      if (rows != batch_.rows) {
        throw std::invalid_argument("the outputs have " + std::to_string(rows) +
                                    " rows along batch_dim=" + std::to_string(dim) +
                                    ", expected " + std::to_string(batch_.rows) +
                                    ", as many as the inputs");
      }
      const Nest<Array> checked = outputs_->in_order(outputs);
      if (blocking != nullptr && num_bytes(checked.leaves) > kLongCopy)
        blocking->begin();
      const Nest<Array> copies = checked.map(
          [this](const Array& array) { return copied(outputs_->allocate, array); });
      outputs_->are_first(copies);
      answered_ = true;
      int64_t begin = 0;
      for (internal::Ticket& ticket : batch_.payloads) {
        const int64_t n = ticket->rows();
        ticket->answer(copies.map(
            [&](const Array& array) { return array.narrow(dim, begin, n); }));
        begin += n;
      }
    }

    void set_error(const std::string& message) {
      for (internal::Ticket& ticket : batch_.payloads) {
        ticket->fail(std::make_exception_ptr(AsyncError(message)));
      }
    }

   private:
    friend class DynamicBatcher;
    Batch(BatchingQueue<internal::Ticket>::Batch batch,
          std::shared_ptr<Outputs> outputs)
        : batch_(std::move(batch)), outputs_(std::move(outputs)) {}

    BatchingQueue<internal::Ticket>::Batch batch_;
    const std::shared_ptr<Outputs> outputs_;
    std::mutex mu_;          // Held by set_outputs(), so that no two run at a time.
    bool answered_ = false;  // Guarded by mu_.
  };

  explicit DynamicBatcher(const BatchingOptions& options, bool check_outputs = true,
                          Allocate allocate = recycling_allocator())
      : queue_(options, std::move(allocate)),
        outputs_(std::make_shared<Outputs>(options.batch_dim, check_outputs)) {}
  DynamicBatcher(const DynamicBatcher&) = delete;
  DynamicBatcher& operator=(const DynamicBatcher&) = delete;

  // seconds, if given, says where the time went.
  [[nodiscard]] Nest<Array> compute(const Nest<Array>& inputs,
                                    Blocking* blocking = nullptr,
                                    CallSeconds* seconds = nullptr) {
    const auto call =
        std::make_shared<internal::Call>(num_rows(inputs, queue_.options().batch_dim));
    const Registration registration(this, call);
    queue_.enqueue(inputs, internal::Ticket(call), blocking);
    Nest<Array> outputs = call->wait(blocking);
    if (seconds != nullptr) *seconds = call->seconds();
    return outputs;
  }

  [[nodiscard]] std::unique_ptr<Batch> get_batch(Blocking* blocking = nullptr) {
    std::unique_ptr<Batch> batch(new Batch(queue_.dequeue_many(blocking), outputs_));
    for (const internal::Ticket& ticket : batch->batch_.payloads) ticket->taken();
    return batch;
  }

  void close() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      closed_ = true;
      for (internal::Call* call : calls_)
        call->fail(std::make_exception_ptr(closed_error()));
    }
    queue_.close(/*discard=*/true);
  }

  [[nodiscard]] bool is_closed() const { return queue_.is_closed(); }
  [[nodiscard]] int64_t size() const { return queue_.size(); }

 private:
  // What batches need of their batcher, which they may outlive.
  struct Outputs {
    Outputs(int dim, bool must_check) : batch_dim(dim), check(must_check) {}

    // The nest in the order of the first one.
    Nest<Array> in_order(const Nest<Array>& nest) {
      std::lock_guard<std::mutex> lock(mu);
      if (!spec.structure) return nest;
      return {spec.structure, spec.match(nest, batch_dim)};
    }

    void are_first(const Nest<Array>& nest) {
      std::lock_guard<std::mutex> lock(mu);
      if (check && !spec.structure) spec = RowSpec(nest);
    }

    const int batch_dim;
    const bool check;
    const Allocate allocate = recycling_allocator();
    std::mutex mu;
    RowSpec spec;  // Guarded by mu. Of the first outputs.
  };

  // Makes close() reach a call for as long as it waits.
  class Registration {
   public:
    Registration(DynamicBatcher* batcher, std::shared_ptr<internal::Call> call)
        : batcher_(batcher), call_(std::move(call)) {
      std::lock_guard<std::mutex> lock(batcher_->mu_);
      if (batcher_->closed_) throw closed_error();
      batcher_->calls_.insert(call_.get());
    }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;
    ~Registration() {
      std::lock_guard<std::mutex> lock(batcher_->mu_);
      batcher_->calls_.erase(call_.get());
    }

   private:
    DynamicBatcher* const batcher_;
    const std::shared_ptr<internal::Call> call_;
  };

  [[nodiscard]] static Closed closed_error() { return Closed("the batcher is closed"); }

  BatchingQueue<internal::Ticket> queue_;
  const std::shared_ptr<Outputs> outputs_;

  mutable std::mutex mu_;
  bool closed_ = false;                        // Guarded by mu_.
  std::unordered_set<internal::Call*> calls_;  // Guarded by mu_. Those that wait.
};

}  // namespace torchbeast
